// Collective calls between ranks on tensors of the device in the host's memory: gloo's, on the same memory.
//
// Like NCCL it takes no tensor of the CPU: torch finds no backend for one, or the check here fails.
// A part of `host_device.cpp`, and not a unit of its own: torch's headers take most of the time to compile either.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>
#include <vector>

namespace {

using Tensors = std::vector<Tensor>;
using Done = c10::intrusive_ptr<c10d::Work>;

Tensor taken(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone(), "a collective call of this device got a tensor on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "NCCL takes contiguous tensors only");
  return on_cpu(tensor);
}

Tensors taken(const Tensors& tensors) {
  Tensors found;
  for (const Tensor& each : tensors) found.push_back(taken(each));
  return found;
}

std::vector<Tensors> taken(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (const Tensors& each : lists) found.push_back(taken(each));
  return found;
}

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "host"; }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto given = taken(tensors);
    return gloo_->broadcast(given, options);
  }
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto given = taken(tensors);
    return gloo_->allreduce(given, options);
  }
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto given = taken(tensors);
    return gloo_->reduce(given, options);
  }
  Done allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = taken(outputs);
    auto from = taken(inputs);
    return gloo_->allgather(to, from, options);
  }
  Done _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = taken(output), from = taken(input);
    return gloo_->_allgather_base(to, from, options);
  }
  Done reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = taken(outputs);
    auto from = taken(inputs);
    return gloo_->reduce_scatter(to, from, options);
  }
  Done _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = taken(output), from = taken(input);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  Done allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = taken(outputs), from = taken(inputs);
    return gloo_->allgather_into_tensor_coalesced(to, from, options);
  }
  Done reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = taken(outputs), from = taken(inputs);
    return gloo_->reduce_scatter_tensor_coalesced(to, from, options);
  }
  Done alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = taken(output), from = taken(input);
    return gloo_->alltoall_base(to, from, to_sizes, from_sizes, options);
  }
  Done send(Tensors& tensors, int rank, int tag) override {
    auto given = taken(tensors);
    return gloo_->send(given, rank, tag);
  }
  Done recv(Tensors& tensors, int rank, int tag) override {
    auto given = taken(tensors);
    return gloo_->recv(given, rank, tag);
  }
  Done barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

c10::intrusive_ptr<c10d::Backend> collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
  return c10::make_intrusive<Collectives>(std::move(gloo), rank, size);
}

}  // namespace
