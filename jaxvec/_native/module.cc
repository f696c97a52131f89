// The extension module `jaxvec._native._ext`.
//
//   py_engine.cc  Parent, Worker, Engine: the two ends of the dispatch (dispatch.h), and the engine of a pool
//                 that compiled programs step without Python (engine.h)
//   py_calls.cc   packed calls, calls that Python answers, signals (call.h, cuda.h); ffi.cc: XLA's handlers
//   stepper.cc    the stepping loop and the writers of rows; states.cc: incremental snapshots of envs
#define JAXVEC_IMPORTS_NUMPY
#include "python.h"

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ext", nullptr, -1, {}, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit__ext() try {
  import_array();
  Ref module = own(PyModule_Create(&definition));
  for (const auto add : {add_engine, add_calls, add_handlers, add_stepper, add_states}) add(module.get());
  check(PyModule_AddStringConstant(module.get(), "SOURCES", JAXVEC_SOURCES) == 0);
  return module.release();
} catch (const PythonError&) {
  return nullptr;
}
