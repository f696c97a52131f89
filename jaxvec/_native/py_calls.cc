// XLA's handlers, the calls that Python has to answer, and interrupts. callbacks/_ffi.py has the rest of it.
#include <string>
#include <vector>

#include "call.h"
#include "cuda.h"
#include "ffi.h"
#include "interrupts.h"
#include "py_array.h"
#include "python.h"

namespace jaxvec {
namespace {

// --- Calls that Python answers ---

constexpr int kTries = 100;

PyObject *serving, *failing;  // Python's functions: see `_serve` and `_fail` of _ffi.py

// Returns an operand or result of a program, whose memory is there as long as the call lasts.
Ref view(const Array& array) {
  if (array.dtype == 0) {
    PyErr_SetString(PyExc_TypeError, "a buffer has a dtype that NumPy does not have");
    return nullptr;
  }
  const Ref text(PyUnicode_FromFormat("%c%u", static_cast<int>(array.dtype % 256), array.dtype / 256));
  PyArray_Descr* dtype = nullptr;
  if (!text || PyArray_DescrConverter(text.get(), &dtype) == NPY_FAIL) return nullptr;
  const Ref held(reinterpret_cast<PyObject*>(dtype));
  return make_array(held.get(), {array.dims, array.dims + array.rank}, array.data);
}

Ref views(const Array* arrays, uint32_t count) {
  Ref all(PyList_New(count));
  for (uint32_t i = 0; all && i < count; ++i) {
    Ref one = view(arrays[i]);
    if (!one) return nullptr;
    PyList_SetItem(all.get(), i, one.release());
  }
  return all;
}

// Has Python answer; null for an error.
Ref serve(const Call& call) {
  const Ref operands = views(call.operands, call.num_operands);
  const Ref results = operands ? views(call.results, call.num_results) : nullptr;
  if (!results) return nullptr;
  const Ref extra(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(call.extra), call.num_extra));
  const Ref arguments(extra ? Py_BuildValue("{sI sI sO sO sL sL sO sO sI sO}", "verb", call.verb, "status",
                                            call.status, "fresh", call.fresh ? Py_True : Py_False, "extra",
                                            extra.get(), "fingerprint",
                                            static_cast<long long>(call.fingerprint), "waited_ns",
                                            static_cast<long long>(call.waited_ns), "operands",
                                            operands.get(), "results", results.get(), "interrupts",
                                            call.interrupts, "on_device", call.on_device ? Py_True : Py_False)
                            : nullptr);
  const Ref nothing(PyTuple_New(0));
  return Ref(arguments && nothing ? PyObject_Call(serving, nothing.get(), arguments.get()) : nullptr);
}

// Has Python note why a call ends, and returns what XLA is told; null for an error.
Ref fail(const Call& call, PyObject* exception) {
  Ref text(
      PyObject_CallFunction(failing, "OIO", exception, call.pool,
                            call.status == static_cast<uint32_t>(Status::kUnderWay) ? Py_True : Py_False));
  if (text && PyBytes_AsString(text.get()) == nullptr) return nullptr;
  return text;
}

Ref take_exception() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  // `sys.exit(5)` leaves its argument for the value, until it is made an exception.
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return Ref(value);
}

// Has Python answer a call. What Python raises, it is given in another call, which ends with it: no Python
// function could catch all of it, since handlers of signals raise theirs between any two instructions, the
// first and those of an `except` included. For the same reason the ending may take several tries.
std::string answer(const Call& call) {
  Ref exception;
  if (PyErr_CheckSignals() != 0) exception = take_exception();
  for (int tries = 0; tries < kTries; ++tries) {
    const Ref answered = exception ? fail(call, exception.get()) : serve(call);
    if (answered) return exception ? PyBytes_AsString(answered.get()) : "";
    exception = take_exception();
  }
  return "jaxvec was interrupted each time it tried to say why";
}

std::string answer_by_python(Call& call) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string error = answer(call);
  PyGILState_Release(gil);
  return error;
}

// Sets what answers calls; `None` when the interpreter ends, up to which a program may run.
PyObject* set_functions(PyObject*, PyObject* args) {
  PyObject *serve, *fail;
  if (!PyArg_ParseTuple(args, "OO:set_python", &serve, &fail)) return nullptr;
  serving = Py_NewRef(serve);
  failing = Py_NewRef(fail);
  set_python(serve == Py_None ? nullptr : answer_by_python);
  return Py_NewRef(Py_None);
}

// --- CUDA ---

PyObject* prepare(PyObject*, PyObject* args) {
  uint32_t calls;
  Numbers<const uint64_t, NPY_UINT64> sizes;
  if (!PyArg_ParseTuple(args, "IO&:prepare_cuda", &calls, sizes.Convert, &sizes)) return nullptr;
  return WithoutGil([&] { prepare_cuda(calls, sizes.data, sizes.count); });
}

// For tests: takes another driver, or the machine's.
PyObject* use_cuda(PyObject*, PyObject* args) {
  const char* driver;
  if (!PyArg_ParseTuple(args, "z:use_cuda", &driver)) return nullptr;
  use_driver(driver);
  return Py_NewRef(Py_None);
}

// For tests: makes a call as XLA would, with arrays for a GPU's memory. Returns the error's text.
PyObject* call_cuda(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"stream",   "verb",    "fresh",  "extra", "fingerprint",
                                "operands", "results", "packed", nullptr};
  Call call{};
  Py_buffer extra;
  unsigned long long stream;
  int fresh;
  long long fingerprint;
  PyObject *operands, *results, *packed;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KIpy*LOOO!:call_cuda", const_cast<char**>(names), &stream,
                                   &call.verb, &fresh, &extra, &fingerprint, &operands, &results,
                                   &PyArray_Type, &packed)) {
    return nullptr;
  }
  std::string error;
  std::vector<Ref> given, taken;
  Arrays from, to;
  const bool fits =
      to_list(operands, &given) && from.take(given) && to_list(results, &taken) && to.take(taken);
  if (fits) {
    for (Array& array : from.arrays) {
      if (std::string("biufc").find(static_cast<char>(array.dtype % 256)) == std::string::npos)
        array.dtype = 0;
    }
    call.fresh = static_cast<uint32_t>(fresh);
    call.extra = static_cast<const uint8_t*>(extra.buf);
    call.num_extra = static_cast<uint32_t>(extra.len);
    call.fingerprint = fingerprint;
    call.operands = from.arrays.data();
    call.num_operands = static_cast<uint32_t>(from.arrays.size());
    call.results = to.arrays.data();
    call.num_results = static_cast<uint32_t>(to.arrays.size());
    call.interrupts = interrupts();
    call.packed = PyArray_DATA(AsArray(packed));
    call.packed_bytes = static_cast<uint64_t>(PyArray_NBYTES(AsArray(packed)));
    error = *WithoutGil(
        [&] { return std::make_unique<std::string>(answer_on_cuda(call, reinterpret_cast<void*>(stream))); });
  }
  PyBuffer_Release(&extra);
  return fits ? PyUnicode_DecodeUTF8(error.data(), static_cast<Py_ssize_t>(error.size()), "replace")
              : nullptr;
}

// --- Interrupts ---

PyObject* watch(PyObject*, PyObject*) {
  watch_signals();
  return Py_NewRef(Py_None);
}

PyObject* count(PyObject*, PyObject*) { return PyLong_FromUnsignedLong(interrupts()); }

PyMethodDef functions[] = {
    {"set_python", set_functions, METH_VARARGS, nullptr},
    {"prepare_cuda", prepare, METH_VARARGS, nullptr},
    {"use_cuda", use_cuda, METH_VARARGS, nullptr},
    {"call_cuda", AsMethod(call_cuda), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"watch_interrupts", watch, METH_NOARGS, nullptr},
    {"interrupts", count, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

bool add_handler(PyObject* module, const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  const Ref capsule(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
  return capsule && PyModule_AddObjectRef(module, name, capsule.get()) == 0;
}

}  // namespace
}  // namespace jaxvec

bool AddCalls(PyObject* module) {
  return PyModule_AddFunctions(module, jaxvec::functions) == 0 &&
         PyModule_AddIntConstant(module, "FFI_VERSION", static_cast<long>(jaxvec::ffi_version())) == 0 &&
         jaxvec::add_handler(module, "FFI_CALL", jaxvec_ffi_call) &&
         jaxvec::add_handler(module, "FFI_CUDA_CALL", jaxvec_ffi_cuda_call);
}
