// Takes the state of an env and puts it back, where only what is ordinary has changed since the last one.
//
// _snapshots/snapshot.py says what these functions do, and has the rest of the rules.

#include "states.h"

#include <utility>
#include <vector>

namespace {

// The classes of nodes that this file knows, borrowed: see _snapshots/.
struct Nodes {
  PyObject* atoms;      // set of classes, whose values stand for themselves
  PyObject* node;       // Node: of all of them
  PyObject* array;      // Array: an ndarray that has its memory
  PyObject* generator;  // Generator: a numpy.random.Generator, and a node of its bits
  PyObject* bits;       // BitGenerator
  PyObject* space;      // Space
};
PyObject *attributes_name, *array_name, *kind_name, *bits_name, *state_name, *sequence_name, *children_name,
    *give_name, *space_name, *alike_name, *generators_name, *random_name, *bit_generator_name, *seed_name,
    *spawned_name;

// What was met: two attributes may be one object, and then Python keeps them so.
class Met {
 public:
  bool IsNew(PyObject* object) {
    for (int i = 0; i < count_; ++i) {
      if (objects_[i] == object) return false;
    }
    if (count_ == kMost) return false;
    objects_[count_++] = object;
    return true;
  }

 private:
  static constexpr int kMost = 32;
  PyObject* objects_[kMost];
  int count_ = 0;
};

Ref Get(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }

bool IsOf(PyObject* object, PyObject* kind) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == kind; }

// Returns an object of a class with slots, whose `__init__` is left to the caller.
Ref MakeNode(PyObject* kind) {
  return Ref(reinterpret_cast<PyObject*>(Allocate<PyObject>(reinterpret_cast<PyTypeObject*>(kind))));
}

Outcome IsAtom(const Nodes& nodes, PyObject* value) {
  const int found = PySet_Contains(nodes.atoms, reinterpret_cast<PyObject*>(Py_TYPE(value)));
  return found < 0 ? Outcome::kError : found != 0 ? Outcome::kDone : Outcome::kOther;
}

Outcome AreAtoms(const Nodes& nodes, PyObject* tuple) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  Outcome outcome = Outcome::kDone;
  for (Py_ssize_t i = 0; i < count && outcome == Outcome::kDone; ++i) {
    outcome = IsAtom(nodes, PyTuple_GetItem(tuple, i));
  }
  return outcome;
}

// Says whether something stands for itself, since its like can't change.
bool IsItself(const Nodes& nodes, PyObject* node) {
  return PyType_IsSubtype(Py_TYPE(node), reinterpret_cast<PyTypeObject*>(nodes.node)) == 0;
}

bool IsPlainArray(PyObject* value) {
  if (!PyArray_CheckExact(value)) return false;
  PyArrayObject* array = AsArray(value);
  const int type = PyArray_TYPE(array);
  return PyArray_BASE(array) == nullptr && PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA) &&
         PyArray_ISWRITEABLE(array) && (PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type));
}

Ref CopyArray(PyObject* array) { return Ref(PyArray_NewCopy(AsArray(array), NPY_KEEPORDER)); }

// Finds the bits of a generator, and those of a node, if both are of the same kinds and were not met yet.
Outcome FindBits(PyObject* node, PyObject* value, const Nodes& nodes, Met* met, Ref* bits,
                 Ref* node_of_bits) {
  const Ref kind = Get(node, kind_name);
  *node_of_bits = Get(node, bits_name);
  if (!kind || !*node_of_bits) return Outcome::kError;
  if (!IsOf(value, kind.get()) || !IsOf(node_of_bits->get(), nodes.bits)) return Outcome::kOther;
  *bits = Get(value, bit_generator_name);
  const Ref bits_kind = Get(node_of_bits->get(), kind_name);
  if (!*bits || !bits_kind) return Outcome::kError;
  const bool fits = IsOf(bits->get(), bits_kind.get()) && met->IsNew(value) && met->IsNew(bits->get());
  return fits ? Outcome::kDone : Outcome::kOther;
}

Outcome TakeGenerator(PyObject* node, PyObject* value, const Nodes& nodes, Met* met, Ref* fresh) {
  Ref bits, before;
  const Outcome outcome = FindBits(node, value, nodes, met, &bits, &before);
  if (outcome != Outcome::kDone) return outcome;
  const Ref sequence = Get(bits.get(), seed_name), sequence_before = Get(before.get(), sequence_name);
  if (!sequence || !sequence_before) return Outcome::kError;
  // There may be none, or one of another's, and then none is before.
  if (sequence_before.get() == Py_None || Py_TYPE(sequence.get()) != Py_TYPE(sequence_before.get()))
    return Outcome::kOther;
  const Ref spawned = Get(sequence.get(), spawned_name), state = Get(bits.get(), state_name);
  const Ref taken = MakeNode(nodes.bits);
  *fresh = MakeNode(nodes.generator);
  const bool made =
      spawned && state && taken && *fresh &&
      PyObject_SetAttr(taken.get(), kind_name, reinterpret_cast<PyObject*>(Py_TYPE(bits.get()))) == 0 &&
      PyObject_SetAttr(taken.get(), state_name, state.get()) == 0 &&
      PyObject_SetAttr(taken.get(), sequence_name, sequence.get()) == 0 &&
      PyObject_SetAttr(taken.get(), children_name, spawned.get()) == 0 &&
      PyObject_SetAttr(fresh->get(), kind_name, reinterpret_cast<PyObject*>(Py_TYPE(value))) == 0 &&
      PyObject_SetAttr(fresh->get(), bits_name, taken.get()) == 0;
  return made ? Outcome::kDone : Outcome::kError;
}

// Says whether a node is of a simple space from which no random numbers were drawn.
Outcome IsQuiet(PyObject* node) {
  const Ref generators = Get(node, generators_name);
  if (!generators) return Outcome::kError;
  return generators.get() == Py_None ? Outcome::kDone : Outcome::kOther;
}

Outcome TakeSpace(PyObject* node, PyObject* value, Ref* fresh) {
  const Ref space = Get(node, space_name);
  if (!space) return Outcome::kError;
  if (space.get() != value) return Outcome::kOther;
  const Ref random = Get(value, random_name);
  if (!random) return Outcome::kError;
  *fresh = Share(node);
  return random.get() == Py_None ? IsQuiet(node) : Outcome::kOther;
}

// Says whether a space is known to be equal to that of a node.
Outcome FitsSpace(PyObject* node, PyObject* old) {
  const Ref alike = Get(node, alike_name), number(PyLong_FromVoidPtr(old));
  const int found = alike && number ? PyDict_Contains(alike.get(), number.get()) : -1;
  return found < 0 ? Outcome::kError : found != 0 ? IsQuiet(node) : Outcome::kOther;
}

// Takes what is no atom, and of which a node was taken before.
Outcome TakeValue(PyObject* node, PyObject* value, const Nodes& nodes, Met* met, Ref* fresh) {
  if (node == value) {  // which it only is if it stands for itself
    *fresh = Share(node);
    return Outcome::kDone;
  }
  if (IsOf(node, nodes.array)) {
    if (!IsPlainArray(value) || !met->IsNew(value)) return Outcome::kOther;
    *fresh = MakeNode(nodes.array);
    const Ref copy = CopyArray(value);
    const bool made = *fresh && copy && PyObject_SetAttr(fresh->get(), array_name, copy.get()) == 0;
    return made ? Outcome::kDone : Outcome::kError;
  }
  if (IsOf(node, nodes.generator)) return TakeGenerator(node, value, nodes, met, fresh);
  if (IsOf(node, nodes.space)) return TakeSpace(node, value, fresh);
  if (!PyTuple_CheckExact(node) || !PyTuple_CheckExact(value)) return Outcome::kOther;
  *fresh = Share(value);
  return AreAtoms(nodes, value);
}

// Notes that a dict has another item; it is a copy of `before` from the first time on.
bool Change(Ref* dict, PyObject* before, PyObject* name, PyObject* value) {
  if (dict->get() == before) *dict = Ref(PyDict_Copy(before));
  return *dict && PyDict_SetItem(dict->get(), name, value) == 0;
}

// Reads what was taken of a layer: the attributes that are atoms, the nodes of others, and how many there
// are.
bool ReadFields(PyObject* fields, PyObject** atoms, PyObject** nodes, Py_ssize_t* count) {
  return PyArg_ParseTuple(fields, "O!O!n:fields", &PyDict_Type, atoms, &PyDict_Type, nodes, count) != 0;
}

// Takes the attributes of a layer, whose `before` these are.
Outcome TakeLayer(PyObject* layer, PyObject* before, PyObject* told, const Nodes& nodes, Met* met,
                  Ref* taken) {
  PyObject *atoms_before, *nodes_before, *name, *value;
  Py_ssize_t count, place = 0, num_known = 0;
  if (!ReadFields(before, &atoms_before, &nodes_before, &count)) return Outcome::kError;
  *taken = Share(before);
  if (told == Py_None) return Outcome::kDone;
  const Ref held = Get(layer, attributes_name);
  if (!held) return Outcome::kError;
  if (!PyDict_CheckExact(held.get()) || PyDict_Size(held.get()) != count) return Outcome::kOther;
  Ref atoms = Share(atoms_before), others = Share(nodes_before);
  while (PyDict_Next(held.get(), &place, &name, &value) != 0) {
    const Ref kept[] = {Share(name), Share(value)};
    PyObject* was = PyDict_GetItemWithError(atoms_before, name);
    if (was == nullptr && PyErr_Occurred() != nullptr) return Outcome::kError;
    ++num_known;
    if (was == value) continue;
    const Outcome is_atom = IsAtom(nodes, value);
    if (is_atom == Outcome::kError) return is_atom;
    if (is_atom == Outcome::kDone) {  // which may be among the nodes, where once there was one
      const bool is_node = was == nullptr && PyDict_Contains(nodes_before, name) == 1;
      if (was == nullptr && !is_node) return PyErr_Occurred() == nullptr ? Outcome::kOther : Outcome::kError;
      const bool changed =
          is_node ? Change(&others, nodes_before, name, value) : Change(&atoms, atoms_before, name, value);
      if (!changed) return Outcome::kError;
      continue;
    }
    if (was != nullptr) return Outcome::kOther;
    PyObject* node = PyDict_GetItemWithError(nodes_before, name);
    if (node == nullptr) {
      --num_known;
      const int is_told = PyErr_Occurred() != nullptr ? -1 : PySet_Contains(told, name);
      if (is_told != 1) return is_told < 0 ? Outcome::kError : Outcome::kOther;
      continue;
    }
    Ref fresh;
    const Outcome outcome = TakeValue(node, value, nodes, met, &fresh);
    if (outcome != Outcome::kDone) return outcome;
    if (fresh.get() != node && !Change(&others, nodes_before, name, fresh.get())) return Outcome::kError;
  }
  if (num_known != PyDict_Size(atoms_before) + PyDict_Size(nodes_before)) return Outcome::kOther;
  if (atoms.get() != atoms_before || others.get() != nodes_before) {
    *taken = Ref(Py_BuildValue("OOn", atoms.get(), others.get(), count));
    if (!*taken) return Outcome::kError;
  }
  return Outcome::kDone;
}

bool ParseLayers(PyObject* args, PyObject** layers, PyObject** told, PyObject** fields, Nodes* nodes) {
  if (!PyArg_ParseTuple(args, "O!O!O!(O!OOOOO)", &PyList_Type, layers, &PyList_Type, told, &PyList_Type,
                        fields, &PySet_Type, &nodes->atoms, &nodes->node, &nodes->array, &nodes->generator,
                        &nodes->bits, &nodes->space)) {
    return false;
  }
  const Py_ssize_t count = PyList_Size(*layers);
  if (PyList_Size(*told) == count && PyList_Size(*fields) == count) return true;
  PyErr_SetString(PyExc_ValueError, "as many are needed as there are layers");
  return false;
}

// Says whether what a node stands for can be put in the place of `old`, by `PutValue`.
Outcome Fits(PyObject* node, PyObject* old, const Nodes& nodes, Met* met) {
  if (IsOf(node, nodes.space)) return FitsSpace(node, old);
  if (IsItself(nodes, node)) return Outcome::kDone;
  if (!met->IsNew(node)) return Outcome::kOther;
  if (IsOf(node, nodes.array)) {
    const Ref array = Get(node, array_name);
    if (!array) return Outcome::kError;
    return IsPlainArray(array.get()) ? Outcome::kDone : Outcome::kOther;
  }
  if (!IsOf(node, nodes.generator)) return Outcome::kOther;
  Ref bits, node_of_bits;
  const Outcome outcome = FindBits(node, old, nodes, met, &bits, &node_of_bits);
  return outcome != Outcome::kDone || met->IsNew(node_of_bits.get()) ? outcome : Outcome::kOther;
}

bool PutValue(PyObject* node, PyObject* held, PyObject* name, const Nodes& nodes) {
  if (IsOf(node, nodes.array)) {
    const Ref array = Get(node, array_name);
    const Ref copy = array ? CopyArray(array.get()) : Ref();
    return copy && PyDict_SetItem(held, name, copy.get()) == 0;
  }
  if (IsItself(nodes, node)) return PyDict_SetItem(held, name, node) == 0;
  const Ref old = Share(PyDict_GetItemWithError(held, name));
  if (IsOf(node, nodes.space)) return PyObject_SetAttr(old.get(), random_name, Py_None) == 0;
  const Ref bits = Get(old.get(), bit_generator_name), node_of_bits = Get(node, bits_name);
  if (!bits || !node_of_bits) return false;
  return Ref(PyObject_CallMethodObjArgs(node_of_bits.get(), give_name, bits.get(), nullptr)) != nullptr;
}

// Says whether a layer has the same attributes as these fields, and of the kinds that `PutLayer` can put;
// `same` becomes whether those that are atoms are the very same.
Outcome FitsLayer(PyObject* held, PyObject* fields, const Nodes& nodes, Met* met, bool* same) {
  PyObject *atoms, *others, *name, *value;
  Py_ssize_t count, place = 0;
  if (!ReadFields(fields, &atoms, &others, &count)) return Outcome::kError;
  if (!PyDict_CheckExact(held) || PyDict_Size(held) != count) return Outcome::kOther;
  *same = true;
  while (PyDict_Next(atoms, &place, &name, &value) != 0) {
    PyObject* old = PyDict_GetItemWithError(held, name);
    if (old == nullptr) return PyErr_Occurred() != nullptr ? Outcome::kError : Outcome::kOther;
    *same &= old == value;
  }
  place = 0;
  while (PyDict_Next(others, &place, &name, &value) != 0) {
    PyObject* old = PyDict_GetItemWithError(held, name);
    if (old == nullptr) return PyErr_Occurred() != nullptr ? Outcome::kError : Outcome::kOther;
    const Ref kept = Share(old);
    const Outcome outcome = Fits(value, old, nodes, met);
    if (outcome != Outcome::kDone) return outcome;
  }
  return Outcome::kDone;
}

bool PutLayer(PyObject* held, PyObject* fields, const Nodes& nodes, bool same) {
  PyObject *atoms, *others, *name, *value;
  Py_ssize_t count, place = 0;
  if (!ReadFields(fields, &atoms, &others, &count)) return false;
  if (!same && PyDict_Update(held, atoms) < 0) return false;
  while (PyDict_Next(others, &place, &name, &value) != 0) {
    if (!PutValue(value, held, name, nodes)) return false;
  }
  return true;
}

}  // namespace

PyObject* TakeAgain(PyObject*, PyObject* args) {
  PyObject *layers, *told, *before;
  Nodes nodes;
  if (!ParseLayers(args, &layers, &told, &before, &nodes)) return nullptr;
  const Py_ssize_t count = PyList_Size(layers);
  const Ref all(PyList_New(count));
  if (!all) return nullptr;
  Met met;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Ref taken;
    const Outcome outcome = TakeLayer(PyList_GetItem(layers, i), PyList_GetItem(before, i),
                                      PyList_GetItem(told, i), nodes, &met, &taken);
    if (outcome != Outcome::kDone) return outcome == Outcome::kError ? nullptr : Py_NewRef(Py_None);
    PyList_SetItem(all.get(), i, taken.release());
  }
  return Py_NewRef(all.get());
}

PyObject* PutAgain(PyObject*, PyObject* args) {
  PyObject *layers, *told, *fields;
  Nodes nodes;
  if (!ParseLayers(args, &layers, &told, &fields, &nodes)) return nullptr;
  struct Target {
    Ref held;
    PyObject* fields;
    bool same;
  };
  std::vector<Target> targets;
  Met met;
  const Py_ssize_t count = PyList_Size(layers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyList_GetItem(told, i) == Py_None) continue;
    Target target{Get(PyList_GetItem(layers, i), attributes_name), PyList_GetItem(fields, i), true};
    if (!target.held) return nullptr;
    const Outcome outcome = FitsLayer(target.held.get(), target.fields, nodes, &met, &target.same);
    if (outcome != Outcome::kDone) return outcome == Outcome::kError ? nullptr : Py_NewRef(Py_False);
    targets.push_back(std::move(target));
  }
  for (const Target& target : targets) {
    if (!PutLayer(target.held.get(), target.fields, nodes, target.same)) return nullptr;
  }
  return Py_NewRef(Py_True);
}

bool InitStates() {
  const std::pair<PyObject**, const char*> names[] = {
      {&attributes_name, "__dict__"},
      {&array_name, "array"},
      {&kind_name, "kind"},
      {&bits_name, "bits"},
      {&state_name, "state"},
      {&sequence_name, "sequence"},
      {&children_name, "children"},
      {&give_name, "give"},
      {&space_name, "space"},
      {&alike_name, "alike"},
      {&generators_name, "generators"},
      {&random_name, "_np_random"},
      {&bit_generator_name, "bit_generator"},
      {&seed_name, "seed_seq"},
      {&spawned_name, "n_children_spawned"},
  };
  for (const auto& [name, text] : names) {
    *name = PyUnicode_InternFromString(text);
    if (*name == nullptr) return false;
  }
  return true;
}
