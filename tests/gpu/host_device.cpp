// A device for torch that computes in the host's memory, under the name of `PrivateUse1`.
//
// Its tensors are kept apart from those of the CPU, as a GPU's are: an operator that gets both raises an error, unless CUDA
// would take them, too. Each operator runs the CPU's kernel on tensors that share the memory of its arguments.

// Not torch/extension.h: to read its many headers takes longer than all else.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using Sizes = at::IntArrayRef;

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// --- what torch asks of a device: memory, a stream, a random generator ---

struct HostMemory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(std::max<size_t>(bytes, 1));
    TORCH_CHECK(memory != nullptr, "out of memory: ", bytes, " bytes");
    return {memory, memory, &std::free, DEVICE};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

HostMemory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

struct OneStream final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, OneStream);

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::DataPtr longer = memory.allocate(bytes);
    std::memcpy(longer.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(longer));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

Hooks hooks;

// --- the same memory as a tensor of the CPU, and a result as one of the device ---

/// Returns a tensor of the CPU in the memory of `tensor`, or `tensor` itself if it is one.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  at::AutoDispatchBelowAutograd guard;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  // An output that an operator has yet to size must be one that can be resized.
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const Tensor kept = tensor.detach();
  const int64_t elements = tensor.storage().nbytes() / tensor.element_size();
  const Tensor flat = at::from_blob(tensor.storage().mutable_data(), {elements}, [kept](void*) {}, options);
  return flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

Tensor on_device(const Tensor& found) {
  const Tensor plain = found.is_non_overlapping_and_dense() ? found : found.contiguous();
  Tensor result = at::empty_strided(plain.sizes(), plain.strides(), plain.options().device(DEVICE));
  on_cpu(result).copy_(plain);
  return result;
}

/// An argument: as the caller gave it, and as the CPU's kernel gets it.
using Given = std::pair<Tensor, Tensor>;

Tensor as_result(const Tensor& found, const std::vector<Given>& given) {
  if (!found.defined()) return found;
  for (const auto& [own, cpu] : given) {
    if (cpu.unsafeGetTensorImpl() != found.unsafeGetTensorImpl()) continue;
    if (own.is_privateuseone() && own.sizes() != found.sizes()) {
      own.resize_(found.sizes());
      on_cpu(own).copy_(found);
    }
    return own;
  }
  for (const auto& [own, cpu] : given) {
    if (!own.is_privateuseone() || found.numel() == 0 || cpu.storage().data() != found.storage().data()) continue;
    Tensor view = at::detail::empty_generic({0}, &memory, KEYS, found.scalar_type(), std::nullopt);
    view.unsafeGetTensorImpl()->set_storage_keep_dtype(own.storage());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides(), found.storage_offset());
    return view;
  }
  return on_device(found);
}

// --- every operator ---

/// CUDA takes indices of the CPU.
const std::set<std::string> TAKES_INDICES_OF_THE_CPU = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const bool mixes = TAKES_INDICES_OF_THE_CPU.count(schema.name()) != 0;
  std::vector<Given> given;
  std::string on_the_cpu;
  bool on_the_device = false;
  const auto take = [&](const Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_privateuseone()) on_the_device = true;
    else if (tensor.dim() > 0) on_the_cpu = argument;  // a scalar may be anywhere
    given.emplace_back(tensor, on_cpu(tensor));
    return given.back().second;
  };
  for (size_t index = first; index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    const auto& name = schema.arguments()[index - first].name();
    if (value.isTensor()) {
      value = take(value.toTensor(), name);
    } else if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : value.toTensorVector()) tensors.push_back(take(each, name));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& each : value.toOptionalTensorVector())
        tensors.push_back(each ? std::optional<Tensor>(take(*each, name)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  TORCH_CHECK(
      !on_the_device || on_the_cpu.empty() || mixes,
      schema.name(), ": the argument `", on_the_cpu, "` is on the CPU, and others are on ", DEVICE);
  // CUDA counts whole numbers, the CPU floating-point ones, and transformers gives each what it takes.
  const bool counts = schema.name() == "aten::histc" && !(*stack)[first].toTensor().is_floating_point();
  if (counts) (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);
  {
    at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      const Tensor found = value.toTensor();
      value = as_result(counts ? found.to(at::kInt) : found, given);
    } else if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : value.toTensorVector()) tensors.push_back(as_result(each, given));
      value = tensors;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// --- operators that make memory, look at it or copy it ---

Tensor empty(
    Sizes sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory, KEYS, c10::dtype_or_default(type), format);
}

Tensor empty_strided(
    Sizes sizes, Sizes strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory, KEYS, c10::dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar item(const Tensor& tensor) { return on_cpu(tensor).item(); }

const Tensor& resize(const Tensor& tensor, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  const size_t bytes = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.element_size();
  if (tensor.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("unfold", at::native::unfold);
  library.impl("view", [](const Tensor& tensor, Sizes sizes) { return at::native::view(tensor, sizes); });
  library.impl("_reshape_alias", [](const Tensor& tensor, Sizes sizes, Sizes strides) {
    return at::native::_reshape_alias(tensor, sizes, strides);
  });
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(&hooks); }

}  // namespace

#include "host_collectives.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", &register_hooks);
  module.def("collectives", &collectives);
}
