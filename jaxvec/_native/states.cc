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

// Names of attributes, interned by add_states.
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
  bool add(PyObject* object) {
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

Ref get(PyObject* object, const Name& name) { return Ref(PyObject_GetAttr(object, name.object)); }

bool set(const Ref& object, const Name& name, PyObject* value) {
  return PyObject_SetAttr(object.get(), name.object, value) == 0;
}

PyObject* class_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// Looks up a borrowed value; kFallback and null if there is none.
Outcome find(PyObject* dict, PyObject* key, PyObject** value) {
  *value = PyDict_GetItemWithError(dict, key);
  if (*value != nullptr) return Outcome::kDone;
  return PyErr_Occurred() != nullptr ? Outcome::kError : Outcome::kFallback;
}

// Returns an object of a class with slots, without calling `__init__`.
Ref make_node(PyObject* cls) { return Ref(allocate(reinterpret_cast<PyTypeObject*>(cls))); }

// Converts the result of a check by Python's C API.
Outcome to_outcome(int found) {
  return found < 0 ? Outcome::kError : found != 0 ? Outcome::kDone : Outcome::kFallback;
}

Outcome is_atom(const Nodes& nodes, PyObject* value) {
  return to_outcome(PySet_Contains(nodes.atoms, class_of(value)));
}

Outcome are_atoms(const Nodes& nodes, PyObject* tuple) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  Outcome outcome = Outcome::kDone;
  for (Py_ssize_t i = 0; i < count && outcome == Outcome::kDone; ++i) {
    outcome = is_atom(nodes, PyTuple_GetItem(tuple, i));
  }
  return outcome;
}

// Returns whether a snapshot holds the value itself in place of a node, because it is immutable.
bool is_value(const Nodes& nodes, PyObject* node) {
  return PyType_IsSubtype(Py_TYPE(node), reinterpret_cast<PyTypeObject*>(nodes.node)) == 0;
}

bool is_plain_array(PyObject* value) {
  if (!PyArray_CheckExact(value)) return false;
  PyArrayObject* array = as_array(value);
  const int type = PyArray_TYPE(array);
  return PyArray_BASE(array) == nullptr && PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA) &&
         PyArray_ISWRITEABLE(array) && (PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type));
}

// Reads `Fields`: the attributes that are atoms, the nodes of the others, and the names of all.
bool read_fields(PyObject* fields, PyObject** atoms, PyObject** others, PyObject** names) {
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

  bool next(PyObject** name, PyObject** value) {
    if (!matches_ || PyDict_Next(held_, &place_, name, value) == 0) return false;
    // Names are interned; an equal one at another address leads to a walk.
    matches_ = PyTuple_GetItem(names_, index_++) == *name;
    return matches_;
  }

  // Returns whether all names were the expected ones, after `next` has returned false.
  Outcome end() const { return matches_ ? Outcome::kDone : Outcome::kFallback; }

 private:
  PyObject *held_, *names_;
  Py_ssize_t place_ = 0, index_ = 0;
  bool matches_;
};

Outcome is_same(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited);

Outcome is_same_dict(PyObject* node, PyObject* dict, const Nodes& nodes) {
  const Ref pairs = get(node, pairs_name);
  if (!pairs) return Outcome::kError;
  if (!PyDict_CheckExact(dict) || PyDict_Size(dict) != PyList_Size(pairs.get())) return Outcome::kFallback;
  PyObject *key, *item;
  Py_ssize_t place = 0, index = 0;
  while (PyDict_Next(dict, &place, &key, &item) != 0) {
    PyObject* pair = PyList_GetItem(pairs.get(), index++);
    if (PyTuple_GetItem(pair, 0) != key || PyTuple_GetItem(pair, 1) != item) return Outcome::kFallback;
    const Outcome outcome = are_atoms(nodes, pair);
    if (outcome != Outcome::kDone) return outcome;
  }
  return Outcome::kDone;
}

Outcome is_same_object(PyObject* node, PyObject* object, const Nodes& nodes, Visited* visited) {
  const Ref cls = get(node, class_name), kept = get(node, kept_name), fields = get(node, fields_name);
  if (!cls || !kept || !fields) return Outcome::kError;
  if (class_of(object) != cls.get() || (kept.get() != Py_None && kept.get() != object))
    return Outcome::kFallback;
  const Ref held = get(object, dict_name);
  if (!held) {  // it has slots only
    PyErr_Clear();
    return Outcome::kFallback;
  }
  PyObject *atoms, *others, *names, *name, *value, *before;
  if (!read_fields(fields.get(), &atoms, &others, &names)) return Outcome::kError;
  if (!visited->add(held.get())) return Outcome::kFallback;
  Attributes attributes(held.get(), names);
  while (attributes.next(&name, &value)) {
    if (find(atoms, name, &before) == Outcome::kError) return Outcome::kError;
    if (before == value) continue;
    if (before != nullptr) return Outcome::kFallback;
    if (find(others, name, &before) == Outcome::kError) return Outcome::kError;
    if (before == nullptr) continue;  // it is not saved
    const Outcome outcome = is_same(before, value, nodes, visited);
    if (outcome != Outcome::kDone) return outcome;
  }
  return attributes.end();
}

// Checks that an object of which `node` is the state has not changed, if that can be seen without a walk.
Outcome is_same(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited) {
  if (node == value && is_value(nodes, node)) return Outcome::kDone;  // it is immutable
  if (class_of(node) != nodes.dict && class_of(node) != nodes.object) return Outcome::kFallback;
  if (!visited->add(node) || !visited->add(value)) return Outcome::kFallback;
  return class_of(node) == nodes.dict ? is_same_dict(node, value, nodes)
                                      : is_same_object(node, value, nodes, visited);
}

Ref copy_array(const Ref& array) { return Ref(PyArray_NewCopy(as_array(array.get()), NPY_KEEPORDER)); }

// Gets the bit generators of a generator and of its node, if the classes are equal and both objects are new.
Outcome find_bits(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* bits,
                  Ref* node_of_bits) {
  const Ref cls = get(node, class_name);
  *node_of_bits = get(node, bits_name);
  if (!cls || !*node_of_bits) return Outcome::kError;
  if (class_of(value) != cls.get() || class_of(node_of_bits->get()) != nodes.bits) return Outcome::kFallback;
  *bits = get(value, bit_generator_name);
  const Ref bits_class = get(node_of_bits->get(), class_name);
  if (!*bits || !bits_class) return Outcome::kError;
  const bool fits =
      class_of(bits->get()) == bits_class.get() && visited->add(value) && visited->add(bits->get());
  return fits ? Outcome::kDone : Outcome::kFallback;
}

Outcome save_generator(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* fresh) {
  Ref bits, before;
  const Outcome outcome = find_bits(node, value, nodes, visited, &bits, &before);
  if (outcome != Outcome::kDone) return outcome;
  const Ref sequence = get(bits.get(), seed_sequence_name),
            sequence_before = get(before.get(), sequence_name);
  if (!sequence || !sequence_before) return Outcome::kError;
  // The node has no sequence if the generator's is None or of another library's class.
  if (sequence_before.get() == Py_None || Py_TYPE(sequence.get()) != Py_TYPE(sequence_before.get()))
    return Outcome::kFallback;
  if (!visited->add(sequence.get())) return Outcome::kFallback;
  const Ref spawned = get(sequence.get(), seeds_spawned_name), state = get(bits.get(), state_name);
  const Ref saved = make_node(nodes.bits);
  *fresh = make_node(nodes.generator);
  const bool made = spawned && state && saved && *fresh && set(saved, class_name, class_of(bits.get())) &&
                    set(saved, state_name, state.get()) && set(saved, sequence_name, sequence.get()) &&
                    set(saved, num_spawned_name, spawned.get()) && set(*fresh, class_name, class_of(value)) &&
                    set(*fresh, bits_name, saved.get());
  return made ? Outcome::kDone : Outcome::kError;
}

// Checks that a node is of a simple space without random numbers.
Outcome has_no_random(PyObject* node) {
  const Ref generators = get(node, generators_name);
  return to_outcome(generators ? generators.get() == Py_None : -1);
}

Outcome save_space(PyObject* node, PyObject* value, Ref* fresh) {
  const Ref space = get(node, space_name);
  if (!space) return Outcome::kError;
  if (space.get() != value) return Outcome::kFallback;
  const Ref random = get(value, random_name);
  if (!random) return Outcome::kError;
  *fresh = share(node);
  return random.get() == Py_None ? has_no_random(node) : Outcome::kFallback;
}

// Saves a value that is not an atom, and for which the last snapshot has `node`.
Outcome save_value(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* fresh) {
  *fresh = share(node);
  const Outcome same = is_same(node, value, nodes, visited);
  if (same != Outcome::kFallback || class_of(node) == nodes.dict || class_of(node) == nodes.object)
    return same;
  if (class_of(node) == nodes.array) {
    if (!is_plain_array(value) || !visited->add(value)) return Outcome::kFallback;
    *fresh = make_node(nodes.array);
    const Ref copy = copy_array(share(value));
    return *fresh && copy && set(*fresh, array_name, copy.get()) ? Outcome::kDone : Outcome::kError;
  }
  if (class_of(node) == nodes.generator) return save_generator(node, value, nodes, visited, fresh);
  if (class_of(node) == nodes.space) return save_space(node, value, fresh);
  if (!PyTuple_CheckExact(node) || !PyTuple_CheckExact(value)) return Outcome::kFallback;
  *fresh = share(value);
  return are_atoms(nodes, value);
}

// Sets an item of a dict that starts as `before` itself and is copied at its first change.
bool change(Ref* dict, PyObject* before, PyObject* name, PyObject* value) {
  if (dict->get() == before) *dict = Ref(PyDict_Copy(before));
  return *dict && PyDict_SetItem(dict->get(), name, value) == 0;
}

// Checks that the layer at `index` still has its class and wraps the next one, as user code may change both.
Outcome wraps_next(PyObject* layers, PyObject* classes, Py_ssize_t index) {
  if (class_of(PyList_GetItem(layers, index)) != PyTuple_GetItem(classes, index)) return Outcome::kFallback;
  if (index + 1 == PyList_Size(layers)) return Outcome::kDone;
  const Ref inner = get(PyList_GetItem(layers, index), env_name);
  return to_outcome(inner ? inner.get() == PyList_GetItem(layers, index + 1) : -1);
}

Outcome save_layer(PyObject* layer, PyObject* before, const Nodes& nodes, Visited* visited, Ref* saved) {
  PyObject *atoms_before, *others_before, *names, *name, *value;
  if (!read_fields(before, &atoms_before, &others_before, &names)) return Outcome::kError;
  const Ref held = get(layer, dict_name);
  if (!held) return Outcome::kError;
  Ref atoms = share(atoms_before), others = share(others_before);
  Attributes attributes(held.get(), names);
  while (attributes.next(&name, &value)) {
    const Ref kept[] = {share(name), share(value)};  // code of classes may run below and change the dict
    PyObject *atom, *node;
    if (find(atoms_before, name, &atom) == Outcome::kError) return Outcome::kError;
    if (atom == value) continue;
    const Outcome kind = is_atom(nodes, value);
    if (kind == Outcome::kError) return kind;
    if (atom != nullptr) {
      if (kind != Outcome::kDone) return kind;
      if (!change(&atoms, atoms_before, name, value)) return Outcome::kError;
      continue;
    }
    if (find(others_before, name, &node) == Outcome::kError) return Outcome::kError;
    if (node == nullptr) continue;  // it is not saved
    Ref fresh = share(value);       // an atom may be among the others, if it was not an atom before
    const Outcome outcome = kind == Outcome::kDone ? kind : save_value(node, value, nodes, visited, &fresh);
    if (outcome != Outcome::kDone) return outcome;
    if (fresh.get() != node && !change(&others, others_before, name, fresh.get())) return Outcome::kError;
  }
  if (attributes.end() != Outcome::kDone) return Outcome::kFallback;
  const bool changed = atoms.get() != atoms_before || others.get() != others_before;
  *saved = changed ? Ref(Py_BuildValue("OOO", atoms.get(), others.get(), names)) : share(before);
  return *saved ? Outcome::kDone : Outcome::kError;
}

bool parse_layers(PyObject* args, PyObject** layers, PyObject** classes, PyObject** fields, Nodes* nodes) {
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
bool add_layers(PyObject* layers, Visited* visited) {
  for (Py_ssize_t i = 0; i < PyList_Size(layers); ++i) {
    if (!visited->add(PyList_GetItem(layers, i))) return false;
  }
  return true;
}

// Checks that `restore_value` can restore the value of a node in place of `old`.
Outcome can_restore(PyObject* node, PyObject* old, const Nodes& nodes, Visited* visited) {
  if (class_of(node) == nodes.space) {
    const Ref equal = get(node, equal_name), number(PyLong_FromVoidPtr(old));
    const Outcome found = to_outcome(equal && number ? PyDict_Contains(equal.get(), number.get()) : -1);
    return found == Outcome::kDone ? has_no_random(node) : found;
  }
  if (is_value(nodes, node)) return Outcome::kDone;
  if (class_of(node) == nodes.dict || class_of(node) == nodes.object)
    return is_same(node, old, nodes, visited);
  if (!visited->add(node)) return Outcome::kFallback;
  if (class_of(node) == nodes.array) {
    const Ref array = get(node, array_name);
    return to_outcome(array ? is_plain_array(array.get()) : -1);
  }
  if (class_of(node) != nodes.generator) return Outcome::kFallback;
  Ref bits, node_of_bits;
  const Outcome outcome = find_bits(node, old, nodes, visited, &bits, &node_of_bits);
  return outcome != Outcome::kDone || visited->add(node_of_bits.get()) ? outcome : Outcome::kFallback;
}

bool restore_value(PyObject* node, PyObject* held, PyObject* name, const Nodes& nodes) {
  if (class_of(node) == nodes.array) {
    const Ref array = get(node, array_name);
    const Ref copy = array ? copy_array(array) : Ref();
    return copy && PyDict_SetItem(held, name, copy.get()) == 0;
  }
  if (is_value(nodes, node)) return PyDict_SetItem(held, name, node) == 0;
  if (class_of(node) == nodes.dict || class_of(node) == nodes.object) return true;  // it has not changed
  const Ref old = share(PyDict_GetItemWithError(held, name));
  if (class_of(node) == nodes.space) return set(old, random_name, Py_None);
  const Ref bits = get(old.get(), bit_generator_name), node_of_bits = get(node, bits_name);
  if (!bits || !node_of_bits) return false;
  return Ref(PyObject_CallMethodObjArgs(node_of_bits.get(), apply_name.object, bits.get(), nullptr)) !=
         nullptr;
}

// Checks that a layer has the attributes of these fields, and that `restore_layer` can restore all. Stores
// whether the atoms are already identical.
Outcome can_restore_layer(PyObject* held, PyObject* fields, const Nodes& nodes, Visited* visited,
                          bool* same) {
  PyObject *atoms, *others, *names, *name, *value, *old;
  if (!read_fields(fields, &atoms, &others, &names)) return Outcome::kError;
  *same = true;
  Attributes attributes(held, names);
  while (attributes.next(&name, &old)) {
    if (find(atoms, name, &value) == Outcome::kError) return Outcome::kError;
    if (value != nullptr) {
      *same &= old == value;
      continue;
    }
    if (find(others, name, &value) == Outcome::kError) return Outcome::kError;
    if (value == nullptr) continue;  // it is not saved
    const Ref kept = share(old);
    const Outcome outcome = can_restore(value, old, nodes, visited);
    if (outcome != Outcome::kDone) return outcome;
  }
  return attributes.end();
}

bool restore_layer(PyObject* held, PyObject* fields, const Nodes& nodes, bool same) {
  PyObject *atoms, *others, *names, *name, *value;
  Py_ssize_t place = 0;
  if (!read_fields(fields, &atoms, &others, &names)) return false;
  if (!same && PyDict_Update(held, atoms) < 0) return false;
  while (PyDict_Next(others, &place, &name, &value) != 0) {
    if (!restore_value(value, held, name, nodes)) return false;
  }
  return true;
}

PyObject* save_changes(PyObject*, PyObject* args) {
  PyObject *layers, *classes, *before;
  Nodes nodes;
  if (!parse_layers(args, &layers, &classes, &before, &nodes)) return nullptr;
  const Py_ssize_t count = PyList_Size(layers);
  Ref all(PyList_New(count));
  if (!all) return nullptr;
  Visited visited;
  if (!add_layers(layers, &visited)) return Py_NewRef(Py_None);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Ref saved;
    Outcome outcome = wraps_next(layers, classes, i);
    if (outcome == Outcome::kDone) {
      outcome = save_layer(PyList_GetItem(layers, i), PyList_GetItem(before, i), nodes, &visited, &saved);
    }
    if (outcome != Outcome::kDone) return outcome == Outcome::kError ? nullptr : Py_NewRef(Py_None);
    PyList_SetItem(all.get(), i, saved.release());
  }
  return all.release();
}

// Checks all layers before it changes any, so a fallback has changed nothing.
PyObject* restore_changes(PyObject*, PyObject* args) {
  PyObject *layers, *classes, *fields;
  Nodes nodes;
  if (!parse_layers(args, &layers, &classes, &fields, &nodes)) return nullptr;
  struct Target {
    Ref held;
    PyObject* fields;
    bool same;
  };
  std::vector<Target> targets;
  Visited visited;
  if (!add_layers(layers, &visited)) return Py_NewRef(Py_False);
  const Py_ssize_t count = PyList_Size(layers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Target target{get(PyList_GetItem(layers, i), dict_name), PyList_GetItem(fields, i), true};
    if (!target.held) return nullptr;
    Outcome outcome = wraps_next(layers, classes, i);
    if (outcome == Outcome::kDone) {
      outcome = can_restore_layer(target.held.get(), target.fields, nodes, &visited, &target.same);
    }
    if (outcome != Outcome::kDone) return outcome == Outcome::kError ? nullptr : Py_NewRef(Py_False);
    targets.push_back(std::move(target));
  }
  for (const Target& target : targets) {
    if (!restore_layer(target.held.get(), target.fields, nodes, target.same)) return nullptr;
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

  Outcome add(PyObject* value, int depth = 0) {
    mix(value);
    if (PyList_CheckExact(value)) return add_list(value, depth);
    if (PyDict_CheckExact(value)) return add_dict(value, depth);
    if (PyTuple_CheckExact(value)) return add_tuple(value, depth);
    const int is_atom = PySet_Contains(atoms_, reinterpret_cast<PyObject*>(Py_TYPE(value)));
    return is_atom < 0 ? Outcome::kError : is_atom != 0 ? Outcome::kDone : Outcome::kFallback;
  }

  uint64_t hash() const { return hash_; }

  // The containers that can change or hold one that can; sorted. `nullptr` with no error if one occurs twice.
  Ref parts() {
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
  void mix(const void* pointer) {
    hash_ = (hash_ ^ reinterpret_cast<uintptr_t>(pointer)) * 0x9E3779B97F4A7C15U;
    hash_ ^= hash_ >> 29;
  }

  // A container may have the address of a freed one of another type.
  void mix_structure(PyObject* container, Py_ssize_t size) {
    mix(Py_TYPE(container));
    mix(reinterpret_cast<const void*>(~static_cast<uintptr_t>(size)));
  }

  // The values of an exact type of an atom need no call, and most are of few types.
  Outcome add_item(PyObject* item, int depth) {
    PyTypeObject* type = Py_TYPE(item);
    if (type == known_atom_) {
      mix(item);
      return Outcome::kDone;
    }
    const Outcome outcome = add(item, depth + 1);
    if (outcome == Outcome::kDone && !PyList_CheckExact(item) && !PyDict_CheckExact(item) &&
        !PyTuple_CheckExact(item)) {
      known_atom_ = type;
    }
    return outcome;
  }

  Outcome add_list(PyObject* list, int depth) {
    if (depth > kMaxDepth) return Outcome::kFallback;
    parts_.push_back(list);
    const Py_ssize_t size = PyList_Size(list);
    mix_structure(list, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Outcome outcome = add_item(PyList_GetItem(list, i), depth);
      if (outcome != Outcome::kDone) return outcome;
    }
    return Outcome::kDone;
  }

  Outcome add_dict(PyObject* dict, int depth) {
    if (depth > kMaxDepth) return Outcome::kFallback;
    parts_.push_back(dict);
    mix_structure(dict, PyDict_Size(dict));
    PyObject *key, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(dict, &place, &key, &value) != 0) {
      for (PyObject* item : {key, value}) {
        const Outcome outcome = add_item(item, depth);
        if (outcome != Outcome::kDone) return outcome;
      }
    }
    return Outcome::kDone;
  }

  Outcome add_tuple(PyObject* tuple, int depth) {
    if (depth > kMaxDepth) return Outcome::kFallback;
    const size_t num_parts = parts_.size();
    const Py_ssize_t size = PyTuple_Size(tuple);
    mix_structure(tuple, size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Outcome outcome = add_item(PyTuple_GetItem(tuple, i), depth);
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
PyObject* plain_identity(PyObject*, PyObject* args) {
  PyObject *container, *atoms, *known;
  if (!PyArg_ParseTuple(args, "OO!O", &container, &PySet_Type, &atoms, &known)) return nullptr;
  Identity identity(atoms);
  const Outcome outcome = identity.add(container);
  if (outcome == Outcome::kError) return nullptr;
  if (outcome == Outcome::kFallback) return Py_NewRef(Py_None);
  const Ref hash(PyLong_FromUnsignedLongLong(identity.hash()));
  if (!hash) return nullptr;
  const int is_same = known == Py_None ? 0 : PyObject_RichCompareBool(hash.get(), known, Py_EQ);
  if (is_same != 0) return is_same < 0 ? nullptr : Py_NewRef(Py_True);
  const Ref parts = identity.parts();
  if (!parts) return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None);
  return Py_BuildValue("OO", hash.get(), parts.get());
}

PyMethodDef functions[] = {
    {"plain_identity", plain_identity, METH_VARARGS, nullptr},
    {"restore_changes", restore_changes, METH_VARARGS, nullptr},
    {"save_changes", save_changes, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_states(PyObject* module) {
  for (Name* name : {&dict_name, &env_name, &array_name, &class_name, &bits_name, &state_name, &sequence_name,
                     &num_spawned_name, &apply_name, &space_name, &equal_name, &generators_name, &random_name,
                     &bit_generator_name, &seed_sequence_name, &seeds_spawned_name, &pairs_name, &kept_name,
                     &fields_name}) {
    name->object = PyUnicode_InternFromString(name->text);
    if (name->object == nullptr) return false;
  }
  return PyModule_AddFunctions(module, functions) == 0;
}
