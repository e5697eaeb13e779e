// What the parts of the device in the host's memory share.
#pragma once

#include <torch/extension.h>

/// Returns a tensor of the CPU in the memory of `tensor`, or `tensor` itself if it is one.
at::Tensor on_cpu(const at::Tensor& tensor);

void bind_collectives(pybind11::module& module);
