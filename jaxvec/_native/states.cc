// Incremental snapshots of an env: saves and restores it if only ordinary attributes have changed since the
// last snapshot. `IncrementalSnapshot` in snapshots/snapshot.py documents these functions, and the walk in
// Python handles all other cases.

#include <algorithm>
#include <utility>
#include <vector>

#include "python.h"

namespace {

// The node classes of snapshots/ that this file knows; borrowed from the caller's arguments.
struct Nodes {
  PyObject* atoms;      // set of classes with immutable values
  PyObject* node;       // Node, the base class
  PyObject* array;      // Array: an ndarray that owns its memory
  PyObject* generator;  // Generator: a numpy.random.Generator and the node of its bit generator
  PyObject* bits;       // BitGenerator
  PyObject* space;      // Space
  PyObject* dict;       // Dict
  PyObject* object;     // Object: an object of a Python class, with its attributes
};

// Names of attributes, interned by AddStates.
struct Name {
  const char* text;
  PyObject* object = nullptr;
};
Name dict_name{"__dict__"}, env_name{"env"}, array_name{"array"}, class_name{"cls"}, bits_name{"bits"},
    state_name{"state"}, sequence_name{"sequence"}, num_spawned_name{"num_spawned"}, apply_name{"apply_to"},
    space_name{"space"}, equal_name{"equal"}, generators_name{"generators"}, random_name{"_np_random"},
    bit_generator_name{"bit_generator"}, seed_sequence_name{"seed_seq"},
    seeds_spawned_name{"n_children_spawned"}, pairs_name{"pairs"}, kept_name{"kept"}, fields_name{"fields"};

// The mutable objects, and nodes of unchanged ones, that were seen so far. Two attributes may be one object,
// and only the walk preserves that.
class Visited {
 public:
  // Returns whether the object is new. Also false if there are too many objects.
  bool Add(PyObject* object) {
    for (int i = 0; i < count_; ++i) {
      if (objects_[i] == object) return false;
    }
    if (count_ == kMaxObjects) return false;
    objects_[count_++] = object;
    return true;
  }

 private:
  static constexpr int kMaxObjects = 64;
  PyObject* objects_[kMaxObjects];
  int count_ = 0;
};

Ref Get(PyObject* object, const Name& name) { return Ref(PyObject_GetAttr(object, name.object)); }

bool Set(const Ref& object, const Name& name, PyObject* value) {
  return PyObject_SetAttr(object.get(), name.object, value) == 0;
}

PyObject* ClassOf(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// Looks up a borrowed value; kFallback and null if there is none.
Outcome Find(PyObject* dict, PyObject* key, PyObject** value) {
  *value = PyDict_GetItemWithError(dict, key);
  if (*value != nullptr) return Outcome::kDone;
  return PyErr_Occurred() != nullptr ? Outcome::kError : Outcome::kFallback;
}

// Returns an object of a class with slots, without calling `__init__`.
Ref MakeNode(PyObject* cls) {
  return Ref(reinterpret_cast<PyObject*>(Allocate<PyObject>(reinterpret_cast<PyTypeObject*>(cls))));
}

// Converts the result of a check by Python's C API.
Outcome ToOutcome(int found) {
  return found < 0 ? Outcome::kError : found != 0 ? Outcome::kDone : Outcome::kFallback;
}

Outcome IsAtom(const Nodes& nodes, PyObject* value) {
  return ToOutcome(PySet_Contains(nodes.atoms, ClassOf(value)));
}

Outcome AreAtoms(const Nodes& nodes, PyObject* tuple) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  Outcome outcome = Outcome::kDone;
  for (Py_ssize_t i = 0; i < count && outcome == Outcome::kDone; ++i) {
    outcome = IsAtom(nodes, PyTuple_GetItem(tuple, i));
  }
  return outcome;
}

// Returns whether a snapshot holds the value itself in place of a node, because it is immutable.
bool IsValue(const Nodes& nodes, PyObject* node) {
  return PyType_IsSubtype(Py_TYPE(node), reinterpret_cast<PyTypeObject*>(nodes.node)) == 0;
}

bool IsPlainArray(PyObject* value) {
  if (!PyArray_CheckExact(value)) return false;
  PyArrayObject* array = AsArray(value);
  const int type = PyArray_TYPE(array);
  return PyArray_BASE(array) == nullptr && PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA) &&
         PyArray_ISWRITEABLE(array) && (PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type));
}

// Reads `Fields`: the attributes that are atoms, the nodes of the others, and the names of all.
bool ReadFields(PyObject* fields, PyObject** atoms, PyObject** others, PyObject** names) {
  *atoms = PyTuple_GetItem(fields, 0);
  *others = PyTuple_GetItem(fields, 1);
  *names = PyTuple_GetItem(fields, 2);
  return *atoms != nullptr && *others != nullptr && *names != nullptr;
}

// Goes through the attributes in a `__dict__`, as long as they have the names of `Fields`, in their order.
class Attributes {
 public:
  Attributes(PyObject* held, PyObject* names)
      : held_(held),
        names_(names),
        matches_(PyDict_CheckExact(held) && PyDict_Size(held) == PyTuple_Size(names)) {}

  bool Next(PyObject** name, PyObject** value) {
    if (!matches_ || PyDict_Next(held_, &place_, name, value) == 0) return false;
    // Names are interned; an equal one at another address leads to a walk.
    matches_ = PyTuple_GetItem(names_, index_++) == *name;
    return matches_;
  }

  // Returns whether all names were the expected ones, after `Next` has returned false.
  Outcome End() const { return matches_ ? Outcome::kDone : Outcome::kFallback; }

 private:
  PyObject *held_, *names_;
  Py_ssize_t place_ = 0, index_ = 0;
  bool matches_;
};

Outcome IsSame(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited);

Outcome IsSameDict(PyObject* node, PyObject* dict, const Nodes& nodes) {
  const Ref pairs = Get(node, pairs_name);
  if (!pairs) return Outcome::kError;
  if (!PyDict_CheckExact(dict) || PyDict_Size(dict) != PyList_Size(pairs.get())) return Outcome::kFallback;
  PyObject *key, *item;
  Py_ssize_t place = 0, index = 0;
  while (PyDict_Next(dict, &place, &key, &item) != 0) {
    PyObject* pair = PyList_GetItem(pairs.get(), index++);
    if (PyTuple_GetItem(pair, 0) != key || PyTuple_GetItem(pair, 1) != item) return Outcome::kFallback;
    const Outcome outcome = AreAtoms(nodes, pair);
    if (outcome != Outcome::kDone) return outcome;
  }
  return Outcome::kDone;
}

Outcome IsSameObject(PyObject* node, PyObject* object, const Nodes& nodes, Visited* visited) {
  const Ref cls = Get(node, class_name), kept = Get(node, kept_name), fields = Get(node, fields_name);
  if (!cls || !kept || !fields) return Outcome::kError;
  if (ClassOf(object) != cls.get() || (kept.get() != Py_None && kept.get() != object))
    return Outcome::kFallback;
  const Ref held = Get(object, dict_name);
  if (!held) {  // it has slots only
    PyErr_Clear();
    return Outcome::kFallback;
  }
  PyObject *atoms, *others, *names, *name, *value, *before;
  if (!ReadFields(fields.get(), &atoms, &others, &names)) return Outcome::kError;
  if (!visited->Add(held.get())) return Outcome::kFallback;
  Attributes attributes(held.get(), names);
  while (attributes.Next(&name, &value)) {
    if (Find(atoms, name, &before) == Outcome::kError) return Outcome::kError;
    if (before == value) continue;
    if (before != nullptr) return Outcome::kFallback;
    if (Find(others, name, &before) == Outcome::kError) return Outcome::kError;
    if (before == nullptr) continue;  // it is not saved
    const Outcome outcome = IsSame(before, value, nodes, visited);
    if (outcome != Outcome::kDone) return outcome;
  }
  return attributes.End();
}

// Checks that an object of which `node` is the state has not changed, if that can be seen without a walk.
Outcome IsSame(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited) {
  if (node == value && IsValue(nodes, node)) return Outcome::kDone;  // it is immutable
  if (ClassOf(node) != nodes.dict && ClassOf(node) != nodes.object) return Outcome::kFallback;
  if (!visited->Add(node) || !visited->Add(value)) return Outcome::kFallback;
  return ClassOf(node) == nodes.dict ? IsSameDict(node, value, nodes)
                                     : IsSameObject(node, value, nodes, visited);
}

Ref CopyArray(const Ref& array) { return Ref(PyArray_NewCopy(AsArray(array.get()), NPY_KEEPORDER)); }

// Gets the bit generators of a generator and of its node, if the classes are equal and both objects are new.
Outcome FindBits(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* bits,
                 Ref* node_of_bits) {
  const Ref cls = Get(node, class_name);
  *node_of_bits = Get(node, bits_name);
  if (!cls || !*node_of_bits) return Outcome::kError;
  if (ClassOf(value) != cls.get() || ClassOf(node_of_bits->get()) != nodes.bits) return Outcome::kFallback;
  *bits = Get(value, bit_generator_name);
  const Ref bits_class = Get(node_of_bits->get(), class_name);
  if (!*bits || !bits_class) return Outcome::kError;
  const bool fits =
      ClassOf(bits->get()) == bits_class.get() && visited->Add(value) && visited->Add(bits->get());
  return fits ? Outcome::kDone : Outcome::kFallback;
}

Outcome SaveGenerator(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* fresh) {
  Ref bits, before;
  const Outcome outcome = FindBits(node, value, nodes, visited, &bits, &before);
  if (outcome != Outcome::kDone) return outcome;
  const Ref sequence = Get(bits.get(), seed_sequence_name),
            sequence_before = Get(before.get(), sequence_name);
  if (!sequence || !sequence_before) return Outcome::kError;
  // The node has no sequence if the generator's is None or of another library's class.
  if (sequence_before.get() == Py_None || Py_TYPE(sequence.get()) != Py_TYPE(sequence_before.get()))
    return Outcome::kFallback;
  if (!visited->Add(sequence.get())) return Outcome::kFallback;
  const Ref spawned = Get(sequence.get(), seeds_spawned_name), state = Get(bits.get(), state_name);
  const Ref saved = MakeNode(nodes.bits);
  *fresh = MakeNode(nodes.generator);
  const bool made = spawned && state && saved && *fresh && Set(saved, class_name, ClassOf(bits.get())) &&
                    Set(saved, state_name, state.get()) && Set(saved, sequence_name, sequence.get()) &&
                    Set(saved, num_spawned_name, spawned.get()) && Set(*fresh, class_name, ClassOf(value)) &&
                    Set(*fresh, bits_name, saved.get());
  return made ? Outcome::kDone : Outcome::kError;
}

// Checks that a node is of a simple space without random numbers.
Outcome HasNoRandom(PyObject* node) {
  const Ref generators = Get(node, generators_name);
  return ToOutcome(generators ? generators.get() == Py_None : -1);
}

Outcome SaveSpace(PyObject* node, PyObject* value, Ref* fresh) {
  const Ref space = Get(node, space_name);
  if (!space) return Outcome::kError;
  if (space.get() != value) return Outcome::kFallback;
  const Ref random = Get(value, random_name);
  if (!random) return Outcome::kError;
  *fresh = Share(node);
  return random.get() == Py_None ? HasNoRandom(node) : Outcome::kFallback;
}

// Saves a value that is not an atom, and for which the last snapshot has `node`.
Outcome SaveValue(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* fresh) {
  *fresh = Share(node);
  const Outcome same = IsSame(node, value, nodes, visited);
  if (same != Outcome::kFallback || ClassOf(node) == nodes.dict || ClassOf(node) == nodes.object) return same;
  if (ClassOf(node) == nodes.array) {
    if (!IsPlainArray(value) || !visited->Add(value)) return Outcome::kFallback;
    *fresh = MakeNode(nodes.array);
    const Ref copy = CopyArray(Share(value));
    return *fresh && copy && Set(*fresh, array_name, copy.get()) ? Outcome::kDone : Outcome::kError;
  }
  if (ClassOf(node) == nodes.generator) return SaveGenerator(node, value, nodes, visited, fresh);
  if (ClassOf(node) == nodes.space) return SaveSpace(node, value, fresh);
  if (!PyTuple_CheckExact(node) || !PyTuple_CheckExact(value)) return Outcome::kFallback;
  *fresh = Share(value);
  return AreAtoms(nodes, value);
}

// Sets an item of a dict that starts as `before` itself and is copied at its first change.
bool Change(Ref* dict, PyObject* before, PyObject* name, PyObject* value) {
  if (dict->get() == before) *dict = Ref(PyDict_Copy(before));
  return *dict && PyDict_SetItem(dict->get(), name, value) == 0;
}

// Checks that the layer at `index` still has its class and wraps the next one, as user code may change both.
Outcome WrapsNext(PyObject* layers, PyObject* classes, Py_ssize_t index) {
  if (ClassOf(PyList_GetItem(layers, index)) != PyTuple_GetItem(classes, index)) return Outcome::kFallback;
  if (index + 1 == PyList_Size(layers)) return Outcome::kDone;
  const Ref inner = Get(PyList_GetItem(layers, index), env_name);
  return ToOutcome(inner ? inner.get() == PyList_GetItem(layers, index + 1) : -1);
}

Outcome SaveLayer(PyObject* layer, PyObject* before, const Nodes& nodes, Visited* visited, Ref* saved) {
  PyObject *atoms_before, *others_before, *names, *name, *value;
  if (!ReadFields(before, &atoms_before, &others_before, &names)) return Outcome::kError;
  const Ref held = Get(layer, dict_name);
  if (!held) return Outcome::kError;
  Ref atoms = Share(atoms_before), others = Share(others_before);
  Attributes attributes(held.get(), names);
  while (attributes.Next(&name, &value)) {
    const Ref kept[] = {Share(name), Share(value)};  // code of classes may run below and change the dict
    PyObject *atom, *node;
    if (Find(atoms_before, name, &atom) == Outcome::kError) return Outcome::kError;
    if (atom == value) continue;
    const Outcome is_atom = IsAtom(nodes, value);
    if (is_atom == Outcome::kError) return is_atom;
    if (atom != nullptr) {
      if (is_atom != Outcome::kDone) return is_atom;
      if (!Change(&atoms, atoms_before, name, value)) return Outcome::kError;
      continue;
    }
    if (Find(others_before, name, &node) == Outcome::kError) return Outcome::kError;
    if (node == nullptr) continue;  // it is not saved
    Ref fresh = Share(value);       // an atom may be among the others, if it was not an atom before
    const Outcome outcome =
        is_atom == Outcome::kDone ? is_atom : SaveValue(node, value, nodes, visited, &fresh);
    if (outcome != Outcome::kDone) return outcome;
    if (fresh.get() != node && !Change(&others, others_before, name, fresh.get())) return Outcome::kError;
  }
  if (attributes.End() != Outcome::kDone) return Outcome::kFallback;
  const bool changed = atoms.get() != atoms_before || others.get() != others_before;
  *saved = changed ? Ref(Py_BuildValue("OOO", atoms.get(), others.get(), names)) : Share(before);
  return *saved ? Outcome::kDone : Outcome::kError;
}

bool ParseLayers(PyObject* args, PyObject** layers, PyObject** classes, PyObject** fields, Nodes* nodes) {
  if (!PyArg_ParseTuple(args, "O!O!O!(O!OOOOOOO)", &PyList_Type, layers, &PyTuple_Type, classes, &PyList_Type,
                        fields, &PySet_Type, &nodes->atoms, &nodes->node, &nodes->array, &nodes->generator,
                        &nodes->bits, &nodes->space, &nodes->dict, &nodes->object)) {
    return false;
  }
  const Py_ssize_t count = PyList_Size(*layers);
  if (PyTuple_Size(*classes) == count && PyList_Size(*fields) == count) return true;
  PyErr_Format(PyExc_ValueError, "expected %zd classes and %zd fields, one for each layer", count, count);
  return false;
}

// The layers themselves may also be values of attributes, which a walk finds.
bool AddLayers(PyObject* layers, Visited* visited) {
  for (Py_ssize_t i = 0; i < PyList_Size(layers); ++i) {
    if (!visited->Add(PyList_GetItem(layers, i))) return false;
  }
  return true;
}

// Checks that `RestoreValue` can restore the value of a node in place of `old`.
Outcome CanRestore(PyObject* node, PyObject* old, const Nodes& nodes, Visited* visited) {
  if (ClassOf(node) == nodes.space) {
    const Ref equal = Get(node, equal_name), number(PyLong_FromVoidPtr(old));
    const Outcome found = ToOutcome(equal && number ? PyDict_Contains(equal.get(), number.get()) : -1);
    return found == Outcome::kDone ? HasNoRandom(node) : found;
  }
  if (IsValue(nodes, node)) return Outcome::kDone;
  if (ClassOf(node) == nodes.dict || ClassOf(node) == nodes.object) return IsSame(node, old, nodes, visited);
  if (!visited->Add(node)) return Outcome::kFallback;
  if (ClassOf(node) == nodes.array) {
    const Ref array = Get(node, array_name);
    return ToOutcome(array ? IsPlainArray(array.get()) : -1);
  }
  if (ClassOf(node) != nodes.generator) return Outcome::kFallback;
  Ref bits, node_of_bits;
  const Outcome outcome = FindBits(node, old, nodes, visited, &bits, &node_of_bits);
  return outcome != Outcome::kDone || visited->Add(node_of_bits.get()) ? outcome : Outcome::kFallback;
}

bool RestoreValue(PyObject* node, PyObject* held, PyObject* name, const Nodes& nodes) {
  if (ClassOf(node) == nodes.array) {
    const Ref array = Get(node, array_name);
    const Ref copy = array ? CopyArray(array) : Ref();
    return copy && PyDict_SetItem(held, name, copy.get()) == 0;
  }
  if (IsValue(nodes, node)) return PyDict_SetItem(held, name, node) == 0;
  if (ClassOf(node) == nodes.dict || ClassOf(node) == nodes.object) return true;  // it has not changed
  const Ref old = Share(PyDict_GetItemWithError(held, name));
  if (ClassOf(node) == nodes.space) return Set(old, random_name, Py_None);
  const Ref bits = Get(old.get(), bit_generator_name), node_of_bits = Get(node, bits_name);
  if (!bits || !node_of_bits) return false;
  return Ref(PyObject_CallMethodObjArgs(node_of_bits.get(), apply_name.object, bits.get(), nullptr)) !=
         nullptr;
}

// Checks that a layer has the attributes of these fields, and that `RestoreLayer` can restore all. Stores
// whether the atoms are already identical.
Outcome CanRestoreLayer(PyObject* held, PyObject* fields, const Nodes& nodes, Visited* visited, bool* same) {
  PyObject *atoms, *others, *names, *name, *value, *old;
  if (!ReadFields(fields, &atoms, &others, &names)) return Outcome::kError;
  *same = true;
  Attributes attributes(held, names);
  while (attributes.Next(&name, &old)) {
    if (Find(atoms, name, &value) == Outcome::kError) return Outcome::kError;
    if (value != nullptr) {
      *same &= old == value;
      continue;
    }
    if (Find(others, name, &value) == Outcome::kError) return Outcome::kError;
    if (value == nullptr) continue;  // it is not saved
    const Ref kept = Share(old);
    const Outcome outcome = CanRestore(value, old, nodes, visited);
    if (outcome != Outcome::kDone) return outcome;
  }
  return attributes.End();
}

bool RestoreLayer(PyObject* held, PyObject* fields, const Nodes& nodes, bool same) {
  PyObject *atoms, *others, *names, *name, *value;
  Py_ssize_t place = 0;
  if (!ReadFields(fields, &atoms, &others, &names)) return false;
  if (!same && PyDict_Update(held, atoms) < 0) return false;
  while (PyDict_Next(others, &place, &name, &value) != 0) {
    if (!RestoreValue(value, held, name, nodes)) return false;
  }
  return true;
}

PyObject* SaveChanges(PyObject*, PyObject* args) {
  PyObject *layers, *classes, *before;
  Nodes nodes;
  if (!ParseLayers(args, &layers, &classes, &before, &nodes)) return nullptr;
  const Py_ssize_t count = PyList_Size(layers);
  Ref all(PyList_New(count));
  if (!all) return nullptr;
  Visited visited;
  if (!AddLayers(layers, &visited)) return Py_NewRef(Py_None);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Ref saved;
    Outcome outcome = WrapsNext(layers, classes, i);
    if (outcome == Outcome::kDone) {
      outcome = SaveLayer(PyList_GetItem(layers, i), PyList_GetItem(before, i), nodes, &visited, &saved);
    }
    if (outcome != Outcome::kDone) return outcome == Outcome::kError ? nullptr : Py_NewRef(Py_None);
    PyList_SetItem(all.get(), i, saved.release());
  }
  return all.release();
}

// Checks all layers before it changes any, so a fallback has changed nothing.
PyObject* RestoreChanges(PyObject*, PyObject* args) {
  PyObject *layers, *classes, *fields;
  Nodes nodes;
  if (!ParseLayers(args, &layers, &classes, &fields, &nodes)) return nullptr;
  struct Target {
    Ref held;
    PyObject* fields;
    bool same;
  };
  std::vector<Target> targets;
  Visited visited;
  if (!AddLayers(layers, &visited)) return Py_NewRef(Py_False);
  const Py_ssize_t count = PyList_Size(layers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Target target{Get(PyList_GetItem(layers, i), dict_name), PyList_GetItem(fields, i), true};
    if (!target.held) return nullptr;
    Outcome outcome = WrapsNext(layers, classes, i);
    if (outcome == Outcome::kDone) {
      outcome = CanRestoreLayer(target.held.get(), target.fields, nodes, &visited, &target.same);
    }
    if (outcome != Outcome::kDone) return outcome == Outcome::kError ? nullptr : Py_NewRef(Py_False);
    targets.push_back(std::move(target));
  }
  for (const Target& target : targets) {
    if (!RestoreLayer(target.held.get(), target.fields, nodes, target.same)) return nullptr;
  }
  return Py_NewRef(Py_True);
}

// --- Large containers that have not changed, see `Plain` in snapshots/node_types.py ---

constexpr int kMaxDepth = 32;  // a container that holds itself is deeper

// Hashes the addresses of all objects in a container, in their order. The copy keeps the values alive, so
// equal hashes mean the same values, in containers of the same structure.
class Identity {
 public:
  explicit Identity(PyObject* atoms) : atoms_(atoms) {}

  Outcome Add(PyObject* value, int depth = 0) {
    Mix(value);
    if (PyList_CheckExact(value)) return AddList(value, depth);
    if (PyDict_CheckExact(value)) return AddDict(value, depth);
    if (PyTuple_CheckExact(value)) return AddTuple(value, depth);
    const int is_atom = PySet_Contains(atoms_, reinterpret_cast<PyObject*>(Py_TYPE(value)));
    return is_atom < 0 ? Outcome::kError : is_atom != 0 ? Outcome::kDone : Outcome::kFallback;
  }

  uint64_t hash() const { return hash_; }

  // The containers that can change or hold one that can; sorted. `nullptr` with no error if one occurs twice.
  Ref Parts() {
    std::sort(parts_.begin(), parts_.end());
    if (std::adjacent_find(parts_.begin(), parts_.end()) != parts_.end()) return Ref();
    Ref numbers(PyList_New(static_cast<Py_ssize_t>(parts_.size())));
    for (size_t i = 0; numbers && i < parts_.size(); ++i) {
      PyObject* number = PyLong_FromVoidPtr(parts_[i]);
      if (number == nullptr) return Ref();
      PyList_SetItem(numbers.get(), static_cast<Py_ssize_t>(i), number);
    }
    return numbers;
  }

 private:
  void Mix(const void* pointer) {
    hash_ = (hash_ ^ reinterpret_cast<uintptr_t>(pointer)) * 0x9E3779B97F4A7C15U;
    hash_ ^= hash_ >> 29;
  }

  // A container may have the address of a freed one of another type.
  void MixStructure(PyObject* container, Py_ssize_t size) {
    Mix(Py_TYPE(container));
    Mix(reinterpret_cast<const void*>(~static_cast<uintptr_t>(size)));
  }

  // The values of an exact type of an atom need no call, and most are of few types.
  Outcome AddItem(PyObject* item, int depth) {
    PyTypeObject* type = Py_TYPE(item);
    if (type == known_atom_) {
      Mix(item);
      return Outcome::kDone;
    }
    const Outcome outcome = Add(item, depth + 1);
    if (outcome == Outcome::kDone && !PyList_CheckExact(item) && !PyDict_CheckExact(item) &&
        !PyTuple_CheckExact(item)) {
      known_atom_ = type;
    }
    return outcome;
  }

  Outcome AddList(PyObject* list, int depth) {
    if (depth > kMaxDepth) return Outcome::kFallback;
    parts_.push_back(list);
    const Py_ssize_t size = PyList_Size(list);
    MixStructure(list, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Outcome outcome = AddItem(PyList_GetItem(list, i), depth);
      if (outcome != Outcome::kDone) return outcome;
    }
    return Outcome::kDone;
  }

  Outcome AddDict(PyObject* dict, int depth) {
    if (depth > kMaxDepth) return Outcome::kFallback;
    parts_.push_back(dict);
    MixStructure(dict, PyDict_Size(dict));
    PyObject *key, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(dict, &place, &key, &value) != 0) {
      for (PyObject* item : {key, value}) {
        const Outcome outcome = AddItem(item, depth);
        if (outcome != Outcome::kDone) return outcome;
      }
    }
    return Outcome::kDone;
  }

  Outcome AddTuple(PyObject* tuple, int depth) {
    if (depth > kMaxDepth) return Outcome::kFallback;
    const size_t num_parts = parts_.size();
    const Py_ssize_t size = PyTuple_Size(tuple);
    MixStructure(tuple, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Outcome outcome = AddItem(PyTuple_GetItem(tuple, i), depth);
      if (outcome != Outcome::kDone) return outcome;
    }
    if (parts_.size() > num_parts) parts_.push_back(tuple);  // a container in it can change
    return Outcome::kDone;
  }

  PyObject* atoms_;
  PyTypeObject* known_atom_ = nullptr;
  uint64_t hash_ = 0;
  std::vector<PyObject*> parts_;
};

// Takes a container, the set of classes of atoms, and a hash or None. Returns None if the container holds
// anything but atoms in lists, dicts and tuples, or one of these twice; True if it has that hash; else its
// hash, and the ids of the containers in it.
PyObject* PlainIdentity(PyObject*, PyObject* args) {
  PyObject *container, *atoms, *known;
  if (!PyArg_ParseTuple(args, "OO!O", &container, &PySet_Type, &atoms, &known)) return nullptr;
  Identity identity(atoms);
  const Outcome outcome = identity.Add(container);
  if (outcome == Outcome::kError) return nullptr;
  if (outcome == Outcome::kFallback) return Py_NewRef(Py_None);
  const Ref hash(PyLong_FromUnsignedLongLong(identity.hash()));
  if (!hash) return nullptr;
  const int is_same = known == Py_None ? 0 : PyObject_RichCompareBool(hash.get(), known, Py_EQ);
  if (is_same != 0) return is_same < 0 ? nullptr : Py_NewRef(Py_True);
  const Ref parts = identity.Parts();
  if (!parts) return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None);
  return Py_BuildValue("OO", hash.get(), parts.get());
}

PyMethodDef functions[] = {
    {"plain_identity", PlainIdentity, METH_VARARGS, nullptr},
    {"restore_changes", RestoreChanges, METH_VARARGS, nullptr},
    {"save_changes", SaveChanges, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool AddStates(PyObject* module) {
  for (Name* name : {&dict_name, &env_name, &array_name, &class_name, &bits_name, &state_name, &sequence_name,
                     &num_spawned_name, &apply_name, &space_name, &equal_name, &generators_name, &random_name,
                     &bit_generator_name, &seed_sequence_name, &seeds_spawned_name, &pairs_name, &kept_name,
                     &fields_name}) {
    name->object = PyUnicode_InternFromString(name->text);
    if (name->object == nullptr) return false;
  }
  return PyModule_AddFunctions(module, functions) == 0;
}
