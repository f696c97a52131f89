// The parent's end of the dispatch, as Python's `Parent` holds it.
#pragma once

#include <vector>

#include "handoff.h"
#include "python.h"

namespace jaxvec {

struct ParentEnd {
  Ref marks;  // keeps the segment mapped while `parent` has its addresses
  std::vector<int32_t> sockets;
  Parent parent{};
};

extern PyTypeObject* parent_type;  // of Owner<ParentEnd>

}  // namespace jaxvec
