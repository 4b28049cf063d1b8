// The operators that the device implements, by where they are.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>

#include "backend.hpp"

namespace sim_torch {

void add_views(torch::Library& aten);
void add_copies(torch::Library& aten);
void add_kernels(torch::Library& aten);
void add_own(torch::Library& own);
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim_torch
