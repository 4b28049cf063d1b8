// Copies between host and devices, and between devices.
#include "operators.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <string.h>

namespace sim_torch {

namespace {

using at::Tensor;

// One run of bytes on either side, in the same order.
bool is_plain(const Tensor& from, const Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
         from.strides() == to.strides() && from.is_non_overlapping_and_dense();
}

void copy_operand(const Operand& from, const Operand& to, bool plain, bool over_link) {
  const Tensor source = from.open();
  Tensor target = to.open();
  if (plain) {
    memmove(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
  } else {
    target.copy_(source);
  }
  if (over_link) lmcache_sim_charge_link(target.nbytes());
}

// `later` goes on when `earlier` has reached where it is now.
void order(lmcache_sim_stream earlier, lmcache_sim_stream later) {
  if (earlier == later) return;
  lmcache_sim_event event = nullptr;
  check(lmcache_sim_event_create(lmcache_sim_stream_device(earlier), &event));
  int code = lmcache_sim_event_record(event, earlier);
  if (code == LMCACHE_SIM_OK) code = lmcache_sim_stream_wait_event(later, event);
  lmcache_sim_event_destroy(event);
  check(code);
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (target.numel() == 0 || self.is_same(target)) return target;
  at::assert_no_internal_overlap(target);
  const Tensor source = self.expand(target.sizes());
  const bool over_link = !on_sim(source) || !on_sim(target);
  const bool plain = is_plain(source, target);
  const auto stream = current_handle(on_sim(source) ? source.device() : target.device());
  // Between two devices the source's stream does the work, and the target's waits on either side.
  const auto other = on_sim(target) ? current_handle(target.device()) : stream;
  order(other, stream);
  launch(stream, [from = Operand(source), to = Operand(target), plain, over_link] {
    copy_operand(from, to, plain, over_link);
  });
  order(stream, other);
  if (over_link && !non_blocking) check(lmcache_sim_stream_synchronize(stream));
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (self.sizes() != target.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

}  // namespace

void add_copies(torch::Library& aten) {
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
}

}  // namespace sim_torch
