// The parent's end of the dispatch, as Python has it.
#pragma once

#include <vector>

#include "handoff.h"
#include "python.h"

namespace jaxvec {

struct PortableParentDispatch {
  Ref marks;  // keeps the segment mapped for as long as we have its addresses
  std::vector<int32_t> sockets;
  Parent parent{};
};

extern PyTypeObject* parent_type;  // of Owner<PortableParentDispatch>

}  // namespace jaxvec
