// The node of a plain call in torch's graph of gradients: what attach and differentiate of common/api/differentiable.py do
// for it, without Python's own Function. The launch is fast_path.cpp's; what that leaves is done by Python, as ever.
// Compiled with torch's headers, so that it takes some seconds; common/runtime/fast_path.py does it beside the program.
#include "owned.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>

namespace {
using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What Python returned; its error is thrown.
Owned owned(PyObject *object) {
    if (object) return Owned(object);
    python_error error;
    error.persist();
    throw error;
}

PyObject *backward, *onlookers, *launched;  // what backward.py holds, by name; and as fast_path.cpp has them
PyObject *planned_name, *settings_name, *gradients_name;

// What backward.py has by a name: it may be another by now.
Owned named(PyObject *name) {
    PyObject *const found = PyDict_GetItemWithError(backward, name);
    if (!found && !PyErr_Occurred()) PyErr_SetObject(PyExc_NameError, name);
    return owned(Py_XNewRef(found));
}

bool is_anyone() {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(onlookers); ++i) {
        const Owned answer = owned(PyObject_CallNoArgs(PyTuple_GET_ITEM(onlookers, i)));
        if (PyObject_IsTrue(answer.get())) return true;
    }
    return false;
}

// None for one that is left out.
Owned wrapped(const Tensor &tensor) { return tensor.defined() ? owned(THPVariable_Wrap(tensor)) : Owned(Py_NewRef(Py_None)); }

// A tuple of them; they are given up.
template <class... Objects>
Owned packed(Objects... objects) {
    Owned found = owned(PyTuple_New(sizeof...(objects)));
    Py_ssize_t place = 0;
    (PyTuple_SET_ITEM(found.get(), place++, objects.release()), ...);
    return found;
}

Owned truth(bool value) { return Owned(Py_NewRef(value ? Py_True : Py_False)); }
Owned nothing() { return Owned(Py_NewRef(Py_None)); }

// As backward.py has it.
Tensor gradient_like(const Tensor &tensor, bool is_wanted) {
    if (!is_wanted) return {};
    if (tensor.stride(-1) == 1) return at::empty_like(tensor);
    return at::empty_like(tensor, {}, at::MemoryFormat::Contiguous);
}

struct AttentionBackward : torch::autograd::Node {
    std::array<SavedVariable, 5> saved;  // q, k, v, O and the log-sum-exp
    c10::SafePyObject options, numbers;   // those of plain_settings in backward.py
    const bool deterministic;

    AttentionBackward(torch::autograd::edge_list &&edges, Owned options, Owned numbers, bool deterministic)
        : Node(std::move(edges)), options(options.release(), getPyInterpreter()),
          numbers(numbers.release(), getPyInterpreter()), deterministic(deterministic) {}

    std::string name() const override { return "FlashLadderAttentionBackward"; }

    void release_variables() override {
        const std::lock_guard<std::mutex> alone(mutex_);
        for (SavedVariable &each : saved) each.reset_data();
    }

    variable_list apply(variable_list &&given) override {
        if (!given[0].defined() && !given[1].defined()) return variable_list(3);
        std::array<Tensor, 5> kept;
        {
            const std::lock_guard<std::mutex> alone(mutex_);
            for (int i = 0; i < 5; ++i) kept[i] = saved[i].unpack(getptr());
        }
        const Tensor dout = given[0].defined() ? given[0] : at::zeros_like(kept[3]);
        const bool wants_dq = task_should_compute_output(0);
        const bool wants_dkv = task_should_compute_output(1) || task_should_compute_output(2);

        const pybind11::gil_scoped_acquire python;
        variable_list found = launch(kept, dout, given[1], wants_dq, wants_dkv);
        if (found.empty()) found = compute(kept, dout, given[1], wants_dq, wants_dkv);
        for (int i = 0; i < 3; ++i)
            if (!task_should_compute_output(i)) found[i] = Tensor();
        return found;
    }

    // For torch's compiled autograd: what a graph depends on, and how it is recorded, with tensors that stand for saved ones.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override {
        for (size_t i = 0; i < saved.size(); ++i) args.collect(saved[i], i >= 3);
        const pybind11::gil_scoped_acquire python;
        const Owned said = owned(PyObject_Repr(options.ptr(getPyInterpreter())));
        args.collect(std::string(PyUnicode_AsUTF8(said.get())));
    }
    variable_list apply_with_saved(const variable_list &given, torch::dynamo::autograd::SwapSavedVariables &swaps) override {
        for (SavedVariable &each : saved) swaps.before(each);
        variable_list found = apply(variable_list(given));
        for (SavedVariable &each : saved) swaps.after(each);
        return found;
    }

  private:
    PyObject *held(const c10::SafePyObject &object) const { return Py_NewRef(object.ptr(getPyInterpreter())); }

    // By a plan; nothing where that is left to Python.
    variable_list launch(const std::array<Tensor, 5> &kept, const Tensor &dout, const Tensor &dlse, bool wants_dq, bool wants_dkv) {
        const auto &[q, k, v, o, lse] = kept;
        if (at::GradMode::is_enabled() || is_anyone()) return {};
        for (const Tensor *each : {&k, &v, &o, &lse, &dout, &dlse})  // others stand for several, or are views of numbers
            if (each->defined() && each->key_set() != q.key_set()) return {};
        const auto &context = at::globalContext();
        const bool of_all = context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();

        variable_list found{gradient_like(q, wants_dq), gradient_like(k, wants_dkv), gradient_like(v, wants_dkv)};
        const Owned inputs = packed(wrapped(q), wrapped(k), wrapped(v), wrapped(o), wrapped(dout), wrapped(lse), nothing(),
                                    nothing(), nothing(), wrapped(dlse), nothing(), nothing());
        const Owned outputs = packed(wrapped(found[0]), wrapped(found[1]), wrapped(found[2]));
        const Owned of_call(held(numbers)), of_pass = packed(truth(deterministic || of_all), truth(wants_dq), truth(wants_dkv));
        const Owned asked = owned(PySequence_Concat(of_call.get(), of_pass.get()));
        const Owned plans = named(planned_name);
        PyObject *const arguments[] = {onlookers, plans.get(), inputs.get(), asked.get(), outputs.get()};
        const Owned done = owned(PyObject_Vectorcall(launched, arguments, 5, nullptr));
        return done.get() == Py_True ? found : variable_list();
    }

    variable_list compute(const std::array<Tensor, 5> &kept, const Tensor &dout, const Tensor &dlse, bool wants_dq, bool wants_dkv) {
        const auto &[q, k, v, o, lse] = kept;
        const Owned arguments = packed(wrapped(dout), wrapped(q), wrapped(k), wrapped(v), wrapped(o), wrapped(lse), wrapped(dlse),
                                       Owned(held(options)), truth(wants_dq), truth(wants_dkv), truth(false));
        const Owned done = owned(PyObject_CallObject(named(gradients_name).get(), arguments.get()));
        Tensor dq, dk, dv;
        for (Py_ssize_t i = 0; auto *each : {&dq, &dk, &dv}) *each = THPVariable_Unpack(PyTuple_GET_ITEM(done.get(), i++));
        return {dq, dk, dv};
    }
};

// torch 2.13 counts who holds a node in the node; before it, a shared pointer does.
template <class... Values>
auto made_node(Values &&...values) {
#if __has_include(<torch/csrc/autograd/node.h>)
    return c10::make_intrusive<AttentionBackward>(std::forward<Values>(values)...);
#else
    return std::shared_ptr<AttentionBackward>(new AttentionBackward(std::forward<Values>(values)...), torch::autograd::deleteNode);
#endif
}

// attach(q, k, v, (O, the log-sum-exp), causal, softmax_scale, version, return_lse, deterministic) -> O, or both
PyObject *attach(PyObject *, PyObject *const *given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (count != 9 || !backward || !PyTuple_Check(given[3]) || PyTuple_GET_SIZE(given[3]) != 2)
        return PyErr_Format(PyExc_TypeError, "attach takes q, k, v, outputs and options, after set_up");
    std::array<const Tensor *, 5> tensors;
    for (int i = 0; i < 5; ++i) {
        PyObject *const tensor = i < 3 ? given[i] : PyTuple_GET_ITEM(given[3], i - 3);
        if (!THPVariable_Check(tensor)) return PyErr_Format(PyExc_TypeError, "attach takes tensors");
        tensors[i] = &THPVariable_Unpack(tensor);
    }
    PyObject *const asked[] = {given[4], given[5], given[6], given[8]};
    const Owned settings = owned(PyObject_Vectorcall(named(settings_name).get(), asked, 4, nullptr));
    PyObject *options, *numbers;
    if (!PyArg_ParseTuple(settings.get(), "OO", &options, &numbers)) return nullptr;
    const auto node = made_node(
        torch::autograd::collect_next_edges(*tensors[0], *tensors[1], *tensors[2]), Owned(Py_NewRef(options)),
        Owned(Py_NewRef(numbers)), given[8] == Py_True);
    for (int i = 3; i < 5; ++i) torch::autograd::set_history(*tensors[i], node);
    for (int i = 0; i < 5; ++i) node->saved[i] = SavedVariable(*tensors[i], i >= 3);  // outputs that know their node: no cycle
    return Py_NewRef(given[7] == Py_True ? given[3] : PyTuple_GET_ITEM(given[3], 0));
    END_HANDLE_TH_ERRORS
}

// set_up(what backward.py holds, onlookers, launched of fast_path.cpp)
PyObject *set_up(PyObject *, PyObject *given) {
    if (!PyArg_ParseTuple(given, "O!O!O", &PyDict_Type, &backward, &PyTuple_Type, &onlookers, &launched)) return nullptr;
    Py_INCREF(given);  // which keeps all of them, for good
    Py_RETURN_NONE;
}

bool has_names() {
    return (planned_name = PyUnicode_InternFromString("planned")) && (settings_name = PyUnicode_InternFromString("plain_settings")) &&
           (gradients_name = PyUnicode_InternFromString("compute_gradients"));
}

PyMethodDef methods[] = {{"attach", reinterpret_cast<PyCFunction>(attach), METH_FASTCALL, nullptr},
                         {"set_up", set_up, METH_VARARGS, nullptr},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "node", nullptr, -1, methods};
}  // namespace

PyMODINIT_FUNC PyInit_node() { return has_names() ? PyModule_Create(&module) : nullptr; }
