// Incremental snapshots of an env: saves and restores it if only ordinary attributes have changed since the
// last snapshot. `StatefulEnv` in env_states.py documents these functions, and the walk in
// Python handles all other cases: then functions that return a bool here return false.

#include <algorithm>
#include <initializer_list>
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

Name dict_name{"__dict__"}, env_name{"env"}, array_name{"array"}, class_name{"cls"}, bits_name{"bits"},
    state_name{"state"}, sequence_name{"sequence"}, num_spawned_name{"num_spawned"}, apply_name{"apply_to"},
    space_name{"space"}, equal_name{"equal"}, generators_name{"generators"}, random_name{"_np_random"},
    bit_generator_name{"bit_generator"}, seed_sequence_name{"seed_seq"},
    seeds_spawned_name{"n_children_spawned"}, pairs_name{"pairs"}, fields_name{"fields"};

// The mutable objects, and nodes of unchanged ones, that were seen so far. Two attributes may be one object,
// and only the walk preserves that.
class Visited {
 public:
  // Returns whether the object is new. Also false if there are too many objects.
  bool add(PyObject* object) {
    PyObject** const end = objects_ + count_;
    if (count_ == kMaxObjects || std::find(objects_, end, object) != end) return false;
    objects_[count_++] = object;
    return true;
  }

 private:
  static constexpr int kMaxObjects = 64;
  PyObject* objects_[kMaxObjects];
  int count_ = 0;
};

Ref get(PyObject* object, Name& name) { return own(PyObject_GetAttr(object, name)); }

void set(PyObject* object, Name& name, PyObject* value) { check(PyObject_SetAttr(object, name, value) == 0); }

// Returns an object of a class with these slots, without calling `__init__`.
Ref make_node(PyObject* cls, std::initializer_list<std::pair<Name&, PyObject*>> slots) {
  Ref node = own(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(cls), 0));
  for (const auto& [name, value] : slots) set(node.get(), name, value);
  return node;
}

PyObject* class_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

bool is_atom(PyObject* atoms, PyObject* value) { return is_true(PySet_Contains(atoms, class_of(value))); }

bool are_atoms(const Nodes& nodes, PyObject* tuple) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_atom(nodes.atoms, PyTuple_GetItem(tuple, i))) return false;
  }
  return true;
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

// `Fields` of a snapshot, borrowed.
struct Fields {
  explicit Fields(PyObject* fields)
      : atoms(PyTuple_GetItem(fields, 0)),
        others(PyTuple_GetItem(fields, 1)),
        names(PyTuple_GetItem(fields, 2)) {
    check(atoms != nullptr && others != nullptr && names != nullptr);
  }

  PyObject* atoms;   // dict of the attributes that are atoms
  PyObject* others;  // dict of the nodes of the other attributes
  PyObject* names;   // tuple of the names of all attributes
  bool same = true;  // whether a layer is known to have these atoms already, see `can_restore_layer`
};

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
  bool end() const { return matches_; }

 private:
  PyObject *held_, *names_;
  Py_ssize_t place_ = 0, index_ = 0;
  bool matches_;
};

bool is_same(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited);

bool is_same_dict(PyObject* node, PyObject* dict, const Nodes& nodes) {
  const Ref pairs = get(node, pairs_name);
  if (!PyDict_CheckExact(dict) || PyDict_Size(dict) != PyList_Size(pairs.get())) return false;
  PyObject *key, *item;
  Py_ssize_t place = 0, index = 0;
  while (PyDict_Next(dict, &place, &key, &item) != 0) {
    PyObject* pair = PyList_GetItem(pairs.get(), index++);
    if (PyTuple_GetItem(pair, 0) != key || PyTuple_GetItem(pair, 1) != item) return false;
    if (!are_atoms(nodes, pair)) return false;
  }
  return true;
}

bool is_same_object(PyObject* node, PyObject* object, const Nodes& nodes, Visited* visited) {
  const Ref cls = get(node, class_name), saved = get(node, fields_name);
  if (class_of(object) != cls.get()) return false;
  const Ref held(PyObject_GetAttr(object, dict_name));
  if (clear_error()) return false;  // it has slots only
  const Fields fields(saved.get());
  if (!visited->add(held.get())) return false;
  PyObject *name, *value;
  Attributes attributes(held.get(), fields.names);
  while (attributes.next(&name, &value)) {
    PyObject* const atom = find(fields.atoms, name);
    if (atom == value) continue;
    if (atom != nullptr) return false;
    PyObject* const before = find(fields.others, name);  // null if it is not saved
    if (before != nullptr && !is_same(before, value, nodes, visited)) return false;
  }
  return attributes.end();
}

// Checks that an object of which `node` is the state has not changed, if that can be seen without a walk.
bool is_same(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited) {
  if (node == value && is_value(nodes, node)) return true;  // it is immutable
  if (class_of(node) != nodes.dict && class_of(node) != nodes.object) return false;
  if (!visited->add(node) || !visited->add(value)) return false;
  return class_of(node) == nodes.dict ? is_same_dict(node, value, nodes)
                                      : is_same_object(node, value, nodes, visited);
}

Ref copy_array(PyObject* array) { return own(PyArray_NewCopy(as_array(array), NPY_KEEPORDER)); }

// Gets the bit generators of a generator and of its node, if the classes are equal and both objects are new.
bool find_bits(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited, Ref* bits,
               Ref* node_of_bits) {
  const Ref cls = get(node, class_name);
  *node_of_bits = get(node, bits_name);
  if (class_of(value) != cls.get() || class_of(node_of_bits->get()) != nodes.bits) return false;
  *bits = get(value, bit_generator_name);
  return class_of(bits->get()) == get(node_of_bits->get(), class_name).get() && visited->add(value) &&
         visited->add(bits->get());
}

// Returns a new node of a generator; null if Python has to save it.
Ref save_generator(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited) {
  Ref bits, before;
  if (!find_bits(node, value, nodes, visited, &bits, &before)) return nullptr;
  const Ref sequence = get(bits.get(), seed_sequence_name);
  const Ref sequence_before = get(before.get(), sequence_name);
  // The node has no sequence if the generator's is None or of another library's class.
  if (sequence_before.get() == Py_None || Py_TYPE(sequence.get()) != Py_TYPE(sequence_before.get()) ||
      !visited->add(sequence.get())) {
    return nullptr;
  }
  Ref state = get(bits.get(), state_name), num_spawned = get(sequence.get(), seeds_spawned_name);
  const Ref saved = make_node(nodes.bits, {{class_name, class_of(bits.get())},
                                           {state_name, state.get()},
                                           {sequence_name, sequence.get()},
                                           {num_spawned_name, num_spawned.get()}});
  return make_node(nodes.generator, {{class_name, class_of(value)}, {bits_name, saved.get()}});
}

// Checks that a node is of a simple space without random numbers.
bool has_no_random(PyObject* node) { return get(node, generators_name).get() == Py_None; }

// Returns the node of a value that is not an atom, and for which the last snapshot has `node`; null if Python
// has to save it.
Ref save_value(PyObject* node, PyObject* value, const Nodes& nodes, Visited* visited) {
  if (is_same(node, value, nodes, visited)) return share(node);
  PyObject* const cls = class_of(node);
  if (cls == nodes.array) {
    if (!is_plain_array(value) || !visited->add(value)) return nullptr;
    return make_node(nodes.array, {{array_name, copy_array(value).get()}});
  }
  if (cls == nodes.generator) return save_generator(node, value, nodes, visited);
  if (cls == nodes.space) {
    const bool same = get(node, space_name).get() == value && get(value, random_name).get() == Py_None &&
                      has_no_random(node);
    return same ? share(node) : nullptr;
  }
  const bool tuples = PyTuple_CheckExact(node) && PyTuple_CheckExact(value);
  return tuples && are_atoms(nodes, value) ? share(value) : nullptr;
}

// Sets an item of a dict that starts as `before` itself and is copied at its first change.
void change(Ref* dict, PyObject* before, PyObject* name, PyObject* value) {
  if (dict->get() == before) *dict = own(PyDict_Copy(before));
  set_item(dict->get(), name, value);
}

// Returns the `Fields` of a layer; null if Python has to save it.
Ref save_layer(PyObject* layer, PyObject* before, const Nodes& nodes, Visited* visited) {
  const Fields fields(before);
  const Ref held = get(layer, dict_name);
  Ref atoms = share(fields.atoms), others = share(fields.others);
  PyObject *name, *value;
  Attributes attributes(held.get(), fields.names);
  while (attributes.next(&name, &value)) {
    const Ref kept[] = {share(name), share(value)};  // code of classes may run below and change the dict
    PyObject* const atom = find(fields.atoms, name);
    if (atom == value) continue;
    const bool immutable = is_atom(nodes.atoms, value);
    if (atom != nullptr) {
      if (!immutable) return nullptr;
      change(&atoms, fields.atoms, name, value);
      continue;
    }
    PyObject* const node = find(fields.others, name);
    if (node == nullptr) continue;  // it is not saved
    // An atom may be among the others, if it was not an atom before.
    const Ref fresh = immutable ? share(value) : save_value(node, value, nodes, visited);
    if (!fresh) return nullptr;
    if (fresh.get() != node) change(&others, fields.others, name, fresh.get());
  }
  if (!attributes.end()) return nullptr;
  const bool changed = atoms.get() != fields.atoms || others.get() != fields.others;
  return changed ? own(PyTuple_Pack(3, atoms.get(), others.get(), fields.names)) : share(before);
}

Nodes read_nodes(PyObject* tuple) {
  Nodes nodes;
  check(PyArg_ParseTuple(tuple, "O!OOOOOOO", &PySet_Type, &nodes.atoms, &nodes.node, &nodes.array,
                         &nodes.generator, &nodes.bits, &nodes.space, &nodes.dict, &nodes.object) != 0);
  return nodes;
}

// Checks that each layer still has its class and wraps the next one, as user code may change both. Adds the
// layers, which may also be values of attributes; a walk finds these.
bool add_layers(PyObject* layers, PyObject* classes, Visited* visited) {
  const Py_ssize_t count = PyList_Size(layers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const layer = PyList_GetItem(layers, i);
    if (class_of(layer) != PyTuple_GetItem(classes, i) || !visited->add(layer)) return false;
    if (i + 1 < count && get(layer, env_name).get() != PyList_GetItem(layers, i + 1)) return false;
  }
  return true;
}

// Checks that `restore_value` can restore the value of a node in place of `old`.
bool can_restore(PyObject* node, PyObject* old, const Nodes& nodes, Visited* visited) {
  if (class_of(node) == nodes.space) {
    const Ref equal = get(node, equal_name), number = own(PyLong_FromVoidPtr(old));
    return is_true(PyDict_Contains(equal.get(), number.get())) && has_no_random(node);
  }
  if (is_value(nodes, node)) return true;
  if (class_of(node) == nodes.dict || class_of(node) == nodes.object)
    return is_same(node, old, nodes, visited);
  if (!visited->add(node)) return false;
  if (class_of(node) == nodes.array) return is_plain_array(get(node, array_name).get());
  if (class_of(node) != nodes.generator) return false;
  Ref bits, node_of_bits;
  return find_bits(node, old, nodes, visited, &bits, &node_of_bits) && visited->add(node_of_bits.get());
}

void restore_value(PyObject* node, PyObject* held, PyObject* name, const Nodes& nodes) {
  PyObject* const cls = class_of(node);
  if (cls == nodes.array) return set_item(held, name, copy_array(get(node, array_name).get()).get());
  if (is_value(nodes, node)) return set_item(held, name, node);
  if (cls == nodes.dict || cls == nodes.object) return;  // it has not changed
  const Ref old = share(find(held, name));
  if (cls == nodes.space) return set(old.get(), random_name, Py_None);
  const Ref bits = get(old.get(), bit_generator_name), node_of_bits = get(node, bits_name);
  own(PyObject_CallMethodObjArgs(node_of_bits.get(), apply_name, bits.get(), nullptr));
}

// Checks that a layer has the attributes of these fields, and that `restore_layer` can restore all.
bool can_restore_layer(PyObject* held, Fields& fields, const Nodes& nodes, Visited* visited) {
  PyObject *name, *old;
  Attributes attributes(held, fields.names);
  while (attributes.next(&name, &old)) {
    if (PyObject* const atom = find(fields.atoms, name)) {
      fields.same &= old == atom;
      continue;
    }
    PyObject* const node = find(fields.others, name);
    if (node == nullptr) continue;  // it is not saved
    const Ref kept = share(old);
    if (!can_restore(node, old, nodes, visited)) return false;
  }
  return attributes.end();
}

void restore_layer(PyObject* held, const Fields& fields, const Nodes& nodes) {
  if (!fields.same) check(PyDict_Update(held, fields.atoms) == 0);
  PyObject *name, *node;
  Py_ssize_t place = 0;
  while (PyDict_Next(fields.others, &place, &name, &node) != 0) restore_value(node, held, name, nodes);
}

Ref save_changes(PyObject* layers, PyObject* classes, PyObject* before, PyObject* node_classes) {
  const Nodes nodes = read_nodes(node_classes);
  const Py_ssize_t count = PyList_Size(layers);
  Ref all = own(PyList_New(count));
  Visited visited;
  if (!add_layers(layers, classes, &visited)) return share(Py_None);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Ref saved = save_layer(PyList_GetItem(layers, i), PyList_GetItem(before, i), nodes, &visited);
    if (!saved) return share(Py_None);
    PyList_SetItem(all.get(), i, saved.release());
  }
  return all;
}

// Checks all layers before it changes any, so a fallback has changed nothing.
bool restore_changes(PyObject* layers, PyObject* classes, PyObject* snapshot, PyObject* node_classes) {
  const Nodes nodes = read_nodes(node_classes);
  std::vector<std::pair<Ref, Fields>> targets;
  Visited visited;
  if (!add_layers(layers, classes, &visited)) return false;
  for (Py_ssize_t i = 0; i < PyList_Size(layers); ++i) {
    targets.emplace_back(get(PyList_GetItem(layers, i), dict_name), PyList_GetItem(snapshot, i));
    if (!can_restore_layer(targets.back().first.get(), targets.back().second, nodes, &visited)) return false;
  }
  for (const auto& [held, fields] : targets) restore_layer(held.get(), fields, nodes);
  return true;
}

// --- Large containers that have not changed, see `Plain` in snapshots/node_types.py ---

constexpr int kMaxDepth = 32;  // a container that holds itself is deeper

// Hashes the addresses of all objects in a container, in their order. The copy keeps the values alive, so
// equal hashes mean the same values, in containers of the same structure.
struct Identity {
  // Returns whether the value is an atom, or a container of atoms.
  bool add(PyObject* value, int depth = 0) {
    mix(value);
    if (Py_TYPE(value) == known_atom) return true;
    const bool is_dict = PyDict_CheckExact(value), is_tuple = PyTuple_CheckExact(value);
    if (!is_dict && !is_tuple && !PyList_CheckExact(value)) {
      known_atom = Py_TYPE(value);  // saves a call for the next atom; most are of few types
      return is_atom(atoms, value);
    }
    if (depth > kMaxDepth) return false;
    const size_t num_parts = parts.size();
    const Py_ssize_t size = PyObject_Size(value);
    // A container may have the address of a freed one of another type.
    mix(Py_TYPE(value));
    mix(reinterpret_cast<const void*>(~static_cast<uintptr_t>(size)));
    PyObject *key, *item;
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!is_dict) {
        item = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
      } else if (PyDict_Next(value, &place, &key, &item) == 0 || !add(key, depth + 1)) {
        return false;
      }
      if (!add(item, depth + 1)) return false;
    }
    if (!is_tuple || parts.size() > num_parts) parts.push_back(value);
    return true;
  }

  void mix(const void* pointer) {
    hash = (hash ^ reinterpret_cast<uintptr_t>(pointer)) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 29;
  }

  PyObject* const atoms;
  PyTypeObject* known_atom = nullptr;
  uint64_t hash = 0;
  std::vector<PyObject*> parts{};  // the containers that can change or hold one that can
};

// Takes a container, the set of classes of atoms, and a hash or None. Returns None if the container holds
// anything but atoms in lists, dicts and tuples, or one of these twice; True if it has that hash; else its
// hash, and the ids of the containers in it.
Ref plain_identity(PyObject* container, PyObject* atoms, PyObject* known) {
  Identity identity{atoms};
  if (!identity.add(container)) return share(Py_None);
  const Ref hash = own(PyLong_FromUnsignedLongLong(identity.hash));
  if (known != Py_None && is_true(PyObject_RichCompareBool(hash.get(), known, Py_EQ))) return share(Py_True);
  const Ref ids = own(PySet_New(nullptr));
  for (PyObject* part : identity.parts) {
    check(PySet_Add(ids.get(), own(PyLong_FromVoidPtr(part)).get()) == 0);
  }
  const bool is_tree = static_cast<size_t>(PySet_Size(ids.get())) == identity.parts.size();
  return is_tree ? own(PyTuple_Pack(2, hash.get(), ids.get())) : share(Py_None);
}

}  // namespace

void add_states(PyObject* module) {
  add_functions(module, {define<plain_identity>("plain_identity"), define<restore_changes>("restore_changes"),
                         define<save_changes>("save_changes")});
}
