// Every other operator: the host waits for the stream and runs the CPU's kernel on the device memory itself.
//
// In place, so that an operator that changes part of a tensor does not write back the rest over what other
// streams do meanwhile. Operators with out= arguments, which may resize, and those that make tensors go through
// torch's own fallback, which copies.
#include "operators.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>

#include <set>

namespace sim_torch {

namespace {

using at::Tensor;

struct Opened {
  Tensor original, opened;
};

class Call {
 public:
  Tensor open(const Tensor& tensor) {
    if (!on_sim(tensor)) return tensor;
    if (streams_.insert(current_handle(tensor.device())).second) {
      check(lmcache_sim_stream_synchronize(current_handle(tensor.device())));
    }
    all_.push_back({tensor, open_now(tensor)});
    return all_.back().opened;
  }

  // The caller's tensor for one that the kernel returned.
  Tensor close(const Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu() || all_.empty()) return result;
    for (const Opened& one : all_)
      if (result.is_same(one.opened)) return one.original;
    for (const Opened& one : all_)
      if (result.is_alias_of(one.opened)) return view_of(one, result);
    return result.to(all_.front().original.device());
  }

  bool used_device() const { return !all_.empty(); }

 private:
  static Tensor view_of(const Opened& one, const Tensor& result) {
    TORCH_CHECK(result.scalar_type() == one.opened.scalar_type(), "sim: a view with another type is not supported here");
    return one.original.as_strided(result.sizes(), result.strides(),
                                   one.original.storage_offset() + result.storage_offset() - one.opened.storage_offset());
  }

  std::vector<Opened> all_;
  std::set<lmcache_sim_stream> streams_;
};

bool needs_copies(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  for (const auto& argument : schema.arguments())
    if (argument.is_out()) return true;
  for (const auto& value : arguments)
    if (value.isDevice()) return true;
  return false;
}

template <typename Convert>
void convert(c10::IValue& value, Convert&& convert_one) {
  if (value.isTensor()) {
    value = convert_one(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> converted;
    for (const Tensor& tensor : value.toTensorVector()) converted.push_back(convert_one(tensor));
    value = converted;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> converted;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      converted.push_back(tensor ? std::optional<Tensor>(convert_one(*tensor)) : std::nullopt);
    }
    value = converted;
  }
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  if (needs_copies(schema, arguments)) {
    at::native::cpu_fallback(op, stack, true);
    return;
  }
  Call call;
  for (auto& argument : arguments) convert(argument, [&](const Tensor& tensor) { return call.open(tensor); });
  if (!call.used_device()) {
    at::native::cpu_fallback(op, stack, true);
    return;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  for (auto& result : arguments) {
    convert(result, [&](const Tensor& tensor) { return call.close(tensor); });
    stack->push_back(std::move(result));
  }
}

}  // namespace sim_torch
