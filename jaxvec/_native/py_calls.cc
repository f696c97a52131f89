// XLA's handlers, packed calls, the calls that Python answers, and signals. callbacks/_ffi.py and
// callbacks/_io_callback.py have the Python half.
#include <string>
#include <vector>

#include "call.h"
#include "cuda.h"
#include "ffi.h"
#include "interrupts.h"
#include "py_types.h"
#include "stacks.h"

namespace jaxvec {
namespace {

// --- Calls that Python answers ---

constexpr int kMaxTries = 100;

PyObject *serve_function, *fail_function;  // `_serve` and `_fail` of _ffi.py; under the GIL

// Returns an array over a program's operand or result. Its memory is valid until the call returns.
Ref view(const Array& array) {
  if (array.dtype == 0) {
    PyErr_SetString(PyExc_TypeError, "a buffer has a dtype that NumPy does not have");
    return nullptr;
  }
  const Ref text(PyUnicode_FromFormat("%c%u", static_cast<int>(array.dtype % 256), array.dtype / 256));
  PyArray_Descr* dtype = nullptr;
  if (!text || PyArray_DescrConverter(text.get(), &dtype) == NPY_FAIL) return nullptr;
  const Ref held(reinterpret_cast<PyObject*>(dtype));
  return make_array(dtype, {array.dims, array.dims + array.rank}, array.data);
}

Ref views(const std::vector<Array>& arrays) {
  Ref all(PyList_New(0));
  for (const Array& array : arrays) {
    const Ref one = all ? view(array) : nullptr;
    if (!one || PyList_Append(all.get(), one.get()) < 0) return nullptr;
  }
  return all;
}

// Calls Python's `_serve`; returns null if a Python error is set.
Ref serve(const Call& call) {
  Ref failure = take_failure();
  if (!failure) failure = share(Py_None);
  const Ref operands = views(call.operands);
  const Ref results = operands ? views(call.results) : nullptr;
  if (!results) return nullptr;
  const Ref arguments(Py_BuildValue(
      "{sI sI sO sy# sl sl sO sO sI sO sO}", "verb", call.verb, "status", call.status, "fresh",
      call.fresh ? Py_True : Py_False, "extra", reinterpret_cast<const char*>(call.extra),
      static_cast<Py_ssize_t>(call.num_extra), "fingerprint", call.fingerprint, "waited_ns", call.waited_ns,
      "operands", operands.get(), "results", results.get(), "interrupts", call.interrupts, "on_device",
      call.on_device ? Py_True : Py_False, "failure", failure.get()));
  const Ref nothing(PyTuple_New(0));
  return Ref(arguments && nothing ? PyObject_Call(serve_function, nothing.get(), arguments.get()) : nullptr);
}

// Calls Python's `_fail`, which records why a call ends, and returns the error's text for XLA, as bytes.
// Returns null if a Python error is set.
Ref fail(const Call& call, PyObject* exception) {
  const bool under_way = call.status == static_cast<uint32_t>(Status::kUnderWay);
  Ref text(PyObject_CallFunction(fail_function, "OIO", exception, call.pool, under_way ? Py_True : Py_False));
  if (text && PyBytes_AsString(text.get()) == nullptr) return nullptr;
  return text;
}

// Returns the error's text, empty on success. An exception of `serve` is passed to `fail` in a second call:
// no Python function could catch all exceptions, since signal handlers raise between any two
// instructions, including the first and those of an `except` block. So `fail` may also need several tries.
// The exception, if there is one, goes to `raised`.
std::string answer(const Call& call, Ref* raised = nullptr) {
  Ref exception;
  if (PyErr_CheckSignals() != 0) exception = take_exception();
  for (int tries = 0; tries < kMaxTries; ++tries) {
    const Ref answered = exception ? fail(call, exception.get()) : serve(call);
    if (answered && raised != nullptr && exception) *raised = share(exception.get());
    if (answered) return exception ? PyBytes_AsString(answered.get()) : "";
    exception = take_exception();
  }
  return "signal handlers interrupted jaxvec each time it tried to report an error";
}

std::string answer_with_gil(Call& call) {
  const WithGil gil;
  return answer(call);
}

// Sets the functions that answer calls. At the interpreter's end they are set to `None`, because programs
// may still run then.
PyObject* set_functions(PyObject*, PyObject* args) {
  PyObject *serve, *fail;
  if (!PyArg_ParseTuple(args, "OO:set_python", &serve, &fail)) return nullptr;
  serve_function = Py_NewRef(serve);
  fail_function = Py_NewRef(fail);
  set_python(serve == Py_None ? nullptr : answer_with_gil);
  Py_RETURN_NONE;
}

// Makes the call of a program that has packed its operands and results, for an `io_callback`. Raises the
// exception that ends the call.
PyObject* call_packed(PyObject*, PyObject* args) {
  Call call{};
  const char* extra;
  Py_ssize_t num_extra;
  Numbers<const int64_t, NPY_INT64> operand_layout, result_layout;
  PyObject *operands, *results;
  if (!PyArg_ParseTuple(args, "Ipy#lO&O&OO:call_packed", &call.verb, &call.fresh, &extra, &num_extra,
                        &call.fingerprint, operand_layout.convert, &operand_layout, result_layout.convert,
                        &result_layout, &operands, &results)) {
    return nullptr;
  }
  std::vector<Ref> operand_items, result_items;
  Arrays from, to;
  if (!from.borrow(operands, &operand_items) || !to.borrow(results, &result_items)) return nullptr;
  const auto find = [](const auto& layout, const Arrays& arrays, std::vector<Array>* found) {
    return unpack(layout.data, layout.data + layout.count, arrays.arrays, found);
  };
  if (!find(operand_layout, from, &call.operands) || !find(result_layout, to, &call.results)) {
    PyErr_SetString(PyExc_TypeError, "the arrays are not packed as the program's layouts specify");
    return nullptr;
  }
  watch_signals();  // in each call, as ffi.cc does
  call.extra = reinterpret_cast<const uint8_t*>(extra);
  call.num_extra = static_cast<uint32_t>(num_extra);
  call.interrupts = interrupts();
  const std::shared_ptr<Engine> engine = engine_of(call);
  const Status status = without_gil([&] { return move_on_host(call, engine.get()); });
  if (status == Status::kDone && !interrupted()) Py_RETURN_NONE;
  Ref raised;
  const std::string error =
      ask_python(call, status, engine.get(), [&](const Call& asked) { return answer(asked, &raised); });
  if (error.empty()) Py_RETURN_NONE;
  if (raised) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
  } else {
    PyErr_SetString(PyExc_RuntimeError, error.c_str());
  }
  return nullptr;
}

// --- CUDA ---

PyObject* prepare(PyObject*, PyObject* args) {
  uint32_t calls;
  Numbers<const uint64_t, NPY_UINT64> sizes;
  if (!PyArg_ParseTuple(args, "IO&:prepare_cuda", &calls, sizes.convert, &sizes)) return nullptr;
  without_gil([&] { prepare_cuda(calls, sizes.data, sizes.count); });
  Py_RETURN_NONE;
}

PyObject* use_cuda(PyObject*, PyObject* args) {
  const char* driver;
  if (!PyArg_ParseTuple(args, "z:use_cuda", &driver)) return nullptr;
  use_driver(driver);
  Py_RETURN_NONE;
}

// Makes a call as XLA would, with arrays in place of a GPU's memory, and returns the error's text. For tests.
PyObject* call_cuda(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"stream",   "verb",    "fresh",  "extra", "fingerprint",
                                "operands", "results", "packed", nullptr};
  Call call{};
  const char* extra;
  Py_ssize_t num_extra;
  unsigned long long stream;
  PyObject *operands, *results, *packed;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KIpy#lOOO!:call_cuda", const_cast<char**>(names), &stream,
                                   &call.verb, &call.fresh, &extra, &num_extra, &call.fingerprint, &operands,
                                   &results, &PyArray_Type, &packed)) {
    return nullptr;
  }
  std::vector<Ref> operand_items, result_items;
  Arrays from, to;
  if (!from.borrow(operands, &operand_items) || !to.borrow(results, &result_items)) return nullptr;
  for (Array& array : from.arrays) {
    if (std::string("biufc").find(static_cast<char>(array.dtype % 256)) == std::string::npos) array.dtype = 0;
  }
  call.extra = reinterpret_cast<const uint8_t*>(extra);
  call.num_extra = static_cast<uint32_t>(num_extra);
  call.operands = std::move(from.arrays);
  call.results = std::move(to.arrays);
  call.interrupts = interrupts();
  call.packed = PyArray_DATA(as_array(packed));
  call.packed_bytes = static_cast<uint64_t>(PyArray_NBYTES(as_array(packed)));
  const std::string error =
      without_gil([&] { return answer_on_cuda(call, reinterpret_cast<void*>(stream)); });
  return PyUnicode_DecodeUTF8(error.data(), static_cast<Py_ssize_t>(error.size()), "replace");
}

// --- Signals ---

PyObject* watch(PyObject*, PyObject*) {
  watch_signals();
  Py_RETURN_NONE;
}

PyObject* count(PyObject*, PyObject*) { return PyLong_FromUnsignedLong(interrupts()); }

PyObject* add_stack(PyObject*, PyObject* args) {
  int signal, memory;
  if (!PyArg_ParseTuple(args, "ii:add_native_stack", &signal, &memory)) return nullptr;
  return PyBool_FromLong(add_native_stack(signal, memory));
}

PyMethodDef functions[] = {
    {"set_python", set_functions, METH_VARARGS, nullptr},
    {"call_packed", call_packed, METH_VARARGS, nullptr},
    {"prepare_cuda", prepare, METH_VARARGS, nullptr},
    {"use_cuda", use_cuda, METH_VARARGS, nullptr},
    {"call_cuda", as_method(call_cuda), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"watch_interrupts", watch, METH_NOARGS, nullptr},
    {"interrupts", count, METH_NOARGS, nullptr},
    {"add_native_stack", add_stack, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

bool add_handler(PyObject* module, const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  const Ref capsule(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
  return capsule && PyModule_AddObjectRef(module, name, capsule.get()) == 0;
}

}  // namespace
}  // namespace jaxvec

bool add_calls(PyObject* module) {
  using namespace jaxvec;
  return PyModule_AddFunctions(module, functions) == 0 &&
         PyModule_AddIntConstant(module, "FFI_VERSION", static_cast<long>(ffi_version())) == 0 &&
         add_handler(module, "FFI_CALL", jaxvec_ffi_call) &&
         add_handler(module, "FFI_CUDA_CALL", jaxvec_ffi_cuda_call);
}
