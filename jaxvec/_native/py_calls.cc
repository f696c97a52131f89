// Packed calls, the calls that Python answers, and signals. callbacks/_ffi.py and callbacks/_io_callback.py
// have the Python half.
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "cuda.h"
#include "interrupts.h"
#include "python.h"

namespace jaxvec {
namespace {

// --- Calls that Python answers ---

constexpr int kMaxTries = 100;

PyObject *serve_function, *fail_function;  // `_serve` and `_fail` of _ffi.py; under the GIL

// Returns an array over a program's operand or result. Its memory is valid until the call returns.
Ref view(const Array& array) {
  if (array.dtype == 0) raise(PyExc_TypeError, "a buffer has a dtype that NumPy does not have");
  const Ref text = own(PyUnicode_FromFormat("%c%u", array.dtype % 256, array.dtype / 256));
  PyArray_Descr* dtype = nullptr;
  check(PyArray_DescrConverter(text.get(), &dtype) == NPY_SUCCEED);
  return own(PyArray_NewFromDescr(&PyArray_Type, dtype, static_cast<int>(array.rank), array.dims, nullptr,
                                  array.data, NPY_ARRAY_CARRAY, nullptr));  // takes the dtype
}

Ref views(const std::vector<Array>& arrays) {
  Ref all = own(PyList_New(0));
  for (const Array& array : arrays) {
    check(PyList_Append(all.get(), view(array).get()) == 0);
  }
  return all;
}

// Calls Python's `_serve`.
void serve(const Call& call) {
  Ref failure = take_failure();
  if (!failure) failure = share(Py_None);
  const Ref arguments = own(Py_BuildValue(
      "{sI sI sO sy# sl sl sN sN sI sO sO}", "verb", call.verb, "status", call.status, "fresh",
      call.fresh ? Py_True : Py_False, "extra", reinterpret_cast<const char*>(call.extra),
      static_cast<Py_ssize_t>(call.num_extra), "fingerprint", call.fingerprint, "waited_ns", call.waited_ns,
      "operands", views(call.operands).release(), "results", views(call.results).release(), "interrupts",
      call.interrupts, "on_device", call.on_device ? Py_True : Py_False, "failure", failure.get()));
  own(PyObject_Call(serve_function, own(PyTuple_New(0)).get(), arguments.get()));
}

// Calls Python's `_fail`, which records why a call ends, and returns the error's text for XLA.
std::string fail(const Call& call, PyObject* exception) {
  const bool under_way = call.status == static_cast<uint32_t>(Status::kUnderWay);
  PyObject* const flag = under_way ? Py_True : Py_False;
  const Ref text = own(PyObject_CallFunction(fail_function, "OIO", exception, call.pool, flag));
  const char* const bytes = PyBytes_AsString(text.get());
  check(bytes != nullptr);
  return bytes;
}

// Returns the error's text, empty on success. An exception of `serve` is passed to `fail` in a second call:
// no Python function could catch all exceptions, since signal handlers raise between any two
// instructions, including the first and those of an `except` block. So `fail` may also need several tries.
std::string answer(Call& call) {
  const WithGil gil;
  Ref exception;
  if (PyErr_CheckSignals() != 0) exception = take_exception();
  for (int tries = 0; tries < kMaxTries; ++tries) {
    try {
      if (!exception) {
        serve(call);
        return "";
      }
      std::string text = fail(call, exception.get());
      if (call.raised != nullptr) *static_cast<Ref*>(call.raised) = std::move(exception);
      return text;
    } catch (const PythonError&) {
      exception = take_exception();
    }
  }
  return "signal handlers interrupted jaxvec each time it tried to report an error";
}

// Sets the functions that answer calls. At the interpreter's end they are set to `None`, because programs
// may still run then.
void set_functions(PyObject* serve, PyObject* fail) {
  serve_function = Py_NewRef(serve);
  fail_function = Py_NewRef(fail);
  set_python(serve == Py_None ? nullptr : answer);
}

std::vector<Array> unpacked(const Slots& layout, const Arrays& arrays) {
  std::vector<Array> found;
  if (!unpack(layout.data, layout.data + layout.count, arrays.arrays, &found)) {
    raise(PyExc_TypeError, "the arrays are not packed as the program's layouts specify");
  }
  return found;
}

// Makes the call of a program that has packed its operands and results, for an `io_callback`. Raises the
// exception that ends the call.
void call_packed(uint32_t verb, bool fresh, PyObject* extra, int64_t fingerprint, const Slots& operand_layout,
                 const Slots& result_layout, const Arrays& operands, const Arrays& results) {
  watch_signals();  // in each call, as ffi.cc does
  const auto* const bytes = reinterpret_cast<const uint8_t*>(PyBytes_AsString(extra));
  check(bytes != nullptr);
  Call call{verb, fresh, fingerprint, bytes, static_cast<size_t>(PyBytes_Size(extra)), interrupts()};
  call.operands = unpacked(operand_layout, operands);
  call.results = unpacked(result_layout, results);
  Ref raised;
  call.raised = &raised;
  const std::string error = without_gil([&] { return answer_on_host(call); });
  if (raised) raise_again(raised);
  if (!error.empty()) raise(PyExc_RuntimeError, "%s", error.c_str());
}

// --- CUDA ---

void prepare(uint32_t calls, const Numbers<uint64_t, NPY_UINT64>& sizes) {
  without_gil([&] { prepare_cuda(calls, sizes.data, sizes.count); });
}

}  // namespace
}  // namespace jaxvec

void add_calls(PyObject* module) {
  using namespace jaxvec;
  add_functions(module, {define<set_functions>("set_python"), define<call_packed>("call_packed"),
                         define<prepare>("prepare_cuda"), define<use_driver>("use_cuda"),
                         define<watch_signals>("watch_interrupts"), define<interrupts>("interrupts")});
}
