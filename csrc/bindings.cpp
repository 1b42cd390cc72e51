// The border between Python and the kernels: the only file that knows pybind11.
//
// A tensor crosses it by the DLPack C exchange API of its framework: one C call fills a view
// (pointer, shape, strides, dtype, device), without a link to libtorch.
// Everything a kernel relies on is checked here, once, in the op's own words; then the op runs with
// the GIL released, or, inside `with Graph():`, is recorded.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/graph.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "dlpack.h"
#include "ops.h"
#include "tensor.h"
#ifdef TINYVLLM_WITH_CUDA
#include "cuda/device.h"
#endif

namespace py = pybind11;

namespace tinyvllm {
namespace {

// A tensor argument as it arrives: a borrowed object, not yet looked into, so that an error can
// name the op and the argument.
struct TensorArg {
  PyObject* object = nullptr;
};

}  // namespace
}  // namespace tinyvllm

template <>
struct pybind11::detail::type_caster<tinyvllm::TensorArg> {
  PYBIND11_TYPE_CASTER(tinyvllm::TensorArg, const_name("torch.Tensor"));
  bool load(handle source, bool) {
    value.object = source.ptr();
    return true;
  }
};

namespace tinyvllm {
namespace {

// Plain globals under the GIL: a function-local static would hold its guard while the import below
// lets other threads run.
const DLPackExchangeAPI* g_exchange = nullptr;
PyTypeObject* g_tensor_type = nullptr;  // torch.Tensor, kept for the life of the process
PyObject* g_requires_grad = nullptr;    // the attribute's name

void load_exchange_api() {
  py::object type = py::module_::import("torch").attr("Tensor");
  py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) {
    throw py::import_error("this torch has no DLPack exchange API: tinyvllm needs torch >= 2.10");
  }
  auto* header = static_cast<DLPackExchangeAPIHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (header == nullptr) throw py::error_already_set();
  while (header != nullptr && header->version.major != kDLPackMajorVersion) {
    header = header->prev_api;
  }
  auto* api = reinterpret_cast<DLPackExchangeAPI*>(header);
  if (api == nullptr || api->dltensor_from_py_object_no_sync == nullptr) {
    throw py::import_error("torch's DLPack exchange API is not of version 1, which tinyvllm reads");
  }
  g_requires_grad = PyUnicode_InternFromString("requires_grad");
  if (g_requires_grad == nullptr) throw py::error_already_set();
  g_tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  g_exchange = api;
}

bool requires_grad(PyObject* tensor) {
  PyObject* value = PyObject_GetAttr(tensor, g_requires_grad);
  if (value == nullptr) throw py::error_already_set();
  Py_DECREF(value);  // True and False live on
  return value == Py_True;
}

std::optional<DType> dtype_of(DLDataType type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code * 256 + type.bits) {
    case kDLBfloat * 256 + 16:
      return DType::kBFloat16;
    case kDLFloat * 256 + 16:
      return DType::kFloat16;
    case kDLFloat * 256 + 32:
      return DType::kFloat32;
    case kDLInt * 256 + 32:
      return DType::kInt32;
    case kDLInt * 256 + 64:
      return DType::kInt64;
    case kDLUInt * 256 + 8:
      return DType::kUInt8;
    case kDLBool * 256 + 8:
      return DType::kBool;
    default:
      return std::nullopt;
  }
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

std::string device_name(const Tensor& t) {
  return t.device == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(t.device_id);
}

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

std::string strides_text(const Tensor& t) {
  std::string text = "(";
  for (int i = 0; i < t.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.strides[i]);
  return text + ")";
}

// A dimension: a fixed size, or a letter that takes the size of its first occurrence.
struct Dim {
  const char* name;  // null: fixed
  int64_t size;      // -1: not bound yet
  const char* bound_by = nullptr;

  Dim(const char* letter) : name(letter), size(-1) {}  // NOLINT: implicit on purpose
  Dim(int64_t fixed) : name(nullptr), size(fixed) {}   // NOLINT
};

// The dimensions of one tensor. Cheap to make: it lives in registers for the length of a check.
struct Shape {
  Dim* dims[kMaxDims];
  int ndim = 0;

  Shape(std::initializer_list<Dim*> list) {  // NOLINT
    for (Dim* dim : list) dims[ndim++] = dim;
  }
};

// What a kernel asks of the strides.
enum class Layout {
  kRows,    // the last dimension is contiguous, the others are free
  kTokens,  // every dimension but the first is contiguous: a slice of a wider [T, ...]
  kContiguous,
};

constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kI32 = DType::kInt32;
constexpr DType kI64 = DType::kInt64;

class GraphRecorder;
thread_local GraphRecorder* t_recorder = nullptr;

// Converts and checks the arguments of one call, then runs or records it.
class OpCall {
 public:
  explicit OpCall(const char* op) : op_(op) {}

  Tensor tensor(const char* arg, TensorArg object, std::initializer_list<DType> dtypes,
                const Shape& shape, Layout layout) {
    const Tensor t = view(arg, object);
    check_dtype(arg, t, dtypes);
    check_shape(arg, t, shape);
    check_layout(arg, t, layout);
    if (first_ == nullptr) {
      first_ = arg;
      device_ = t.device;
      device_id_ = t.device_id;
    } else if (t.device != device_ || t.device_id != device_id_) {
      Tensor expected = t;
      expected.device = device_;
      expected.device_id = device_id_;
      fail(arg, "a tensor on " + device_name(expected) + " like " + first_, device_name(t));
    }
    return t;
  }

  // The rank of an argument that may have several.
  int ndim(const char* arg, TensorArg object) {
    const int n = view(arg, object).ndim;
    --num_objects_;
    return n;
  }

  // Throws ValueError: "op: arg: expected ..., got ...".
  [[noreturn]] void fail(const char* arg, const std::string& expected,
                         const std::string& got) const {
    throw py::value_error(std::string(op_) + ": " + arg + ": expected " + expected + ", got " +
                          got);
  }

  // cpu() runs on CPU tensors (or is recorded), cuda(stream) on CUDA tensors.
  template <typename Cpu, typename Cuda>
  void run(Cpu cpu, Cuda cuda);

 private:
  Tensor view(const char* arg, TensorArg object) {
    if (g_exchange == nullptr) load_exchange_api();
    if (!PyObject_TypeCheck(object.object, g_tensor_type)) {
      throw py::type_error(std::string(op_) + ": " + arg + ": expected a torch.Tensor, got " +
                           Py_TYPE(object.object)->tp_name);
    }
    if (requires_grad(object.object)) {
      fail(arg, "a tensor that needs no gradient: these ops record none", "requires_grad=True");
    }
    objects_[num_objects_++] = object.object;
    DLTensor source;
    if (g_exchange->dltensor_from_py_object_no_sync(object.object, &source) != 0) {
      py::raise_from(PyExc_ValueError,
                     (std::string(op_) + ": " + arg + ": this tensor cannot be shared").c_str());
      throw py::error_already_set();
    }
    Tensor t;
    const std::optional<DType> dtype = dtype_of(source.dtype);
    if (!dtype) {
      fail(arg, "a dtype that kernels know",
           "DLPack code " + std::to_string(source.dtype.code) + " of " +
               std::to_string(source.dtype.bits) + " bits");
    }
    if (source.ndim > kMaxDims) {
      fail(arg, "at most " + std::to_string(kMaxDims) + " dimensions", std::to_string(source.ndim));
    }
    switch (source.device.device_type) {
      case kDLCPU:
      case kDLCUDAHost:
        t.device = DeviceType::kCpu;
        break;
      case kDLCUDA:
      case kDLCUDAManaged:
        t.device = DeviceType::kCuda;
        t.device_id = source.device.device_id;
        break;
      default:
        fail(arg, "a tensor on cpu or cuda",
             "DLPack device type " + std::to_string(source.device.device_type));
    }
    t.data = static_cast<char*>(source.data) + source.byte_offset;
    t.dtype = *dtype;
    t.ndim = source.ndim;
    int64_t contiguous = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = source.shape[i];
      t.strides[i] = source.strides != nullptr ? source.strides[i] : contiguous;
      contiguous *= source.shape[i];
    }
    return t;
  }

  void check_dtype(const char* arg, const Tensor& t, std::initializer_list<DType> dtypes) const {
    std::string expected;
    for (const DType dtype : dtypes) {
      if (t.dtype == dtype) return;
      expected += (expected.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    }
    fail(arg, "dtype " + expected, dtype_name(t.dtype));
  }

  void check_shape(const char* arg, const Tensor& t, const Shape& shape) const {
    bool ok = t.ndim == shape.ndim;
    for (int i = 0; ok && i < t.ndim; ++i) {
      Dim* dim = shape.dims[i];
      if (dim->size < 0) {
        dim->size = t.shape[i];
        dim->bound_by = arg;
      }
      ok = dim->size == t.shape[i];
    }
    if (ok) return;
    std::string expected = "shape [", where;
    for (int i = 0; i < shape.ndim; ++i) {
      const Dim* dim = shape.dims[i];
      if (expected.back() != '[') expected += ", ";
      expected += dim->name ? dim->name : std::to_string(dim->size);
      if (dim->name && dim->bound_by && dim->bound_by != arg) {
        where += std::string(where.empty() ? " with " : ", ") + dim->name + " = " +
                 std::to_string(dim->size) + " (from " + dim->bound_by + ")";
      }
    }
    fail(arg, expected + "]" + where, shape_text(t));
  }

  void check_layout(const char* arg, const Tensor& t, Layout layout) const {
    if (t.numel() == 0) return;
    const int first = layout == Layout::kContiguous ? 0
                      : layout == Layout::kTokens   ? 1
                                                    : t.ndim - 1;
    int64_t stride = 1;
    for (int i = t.ndim - 1; i >= first; --i) {
      if (t.shape[i] != 1 && t.strides[i] != stride) {
        fail(arg,
             layout == Layout::kContiguous ? "a contiguous tensor"
             : layout == Layout::kTokens   ? "contiguous dimensions after the first"
                                           : "a contiguous last dimension",
             "strides " + strides_text(t) + " for shape " + shape_text(t));
      }
      stride *= t.shape[i];
    }
  }

  static constexpr int kMaxTensors = 9;

  const char* op_;
  const char* first_ = nullptr;
  DeviceType device_ = DeviceType::kCpu;
  int32_t device_id_ = 0;
  PyObject* objects_[kMaxTensors];
  int num_objects_ = 0;
};

// Lets other Python threads run. The destructor may throw: while the interpreter ends, CPython
// stops a daemon thread that asks for the GIL by unwinding it.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() noexcept(false) { PyEval_RestoreThread(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// `_C.Graph`: a cpu::Graph, and the Python tensors whose memory it points into.
class GraphRecorder {
 public:
  void enter() {
    if (t_recorder != nullptr) throw py::value_error("capture: this thread captures already");
    if (state_ != State::kNew) throw py::value_error("capture: a graph is captured once");
    state_ = State::kCapturing;
    t_recorder = this;
  }

  // An exception inside the capture leaves no half graph behind.
  void exit(bool failed) {
    if (t_recorder != this) {
      throw py::value_error("capture: must end in the thread that began it");
    }
    t_recorder = nullptr;
    state_ = failed ? State::kFailed : State::kReady;
    if (failed) {
      graph_.clear();
      tensors_.clear();
    }
  }

  void record(const char* op, PyObject* const* objects, int num_objects,
              std::function<void()> call) {
    for (int i = 0; i < num_objects; ++i) {
      tensors_.push_back(py::reinterpret_borrow<py::object>(objects[i]));
    }
    graph_.record(op, std::move(call));
  }

  void replay() const {
    check_ready();
    const GilReleased released;
    graph_.replay();
  }

  std::vector<std::pair<std::string, double>> replay_timed() const {
    check_ready();
    std::vector<cpu::Graph::OpTime> times;
    {
      const GilReleased released;
      times = graph_.replay_timed();
    }
    std::vector<std::pair<std::string, double>> result;
    result.reserve(times.size());
    for (const auto& time : times) result.emplace_back(time.name, time.seconds);
    return result;
  }

  size_t num_ops() const { return graph_.size(); }

 private:
  enum class State { kNew, kCapturing, kReady, kFailed };

  void check_ready() const {
    if (t_recorder != nullptr) throw py::value_error("replay: not inside a capture");
    if (state_ == State::kFailed) throw py::value_error("replay: this graph's capture failed");
    if (state_ != State::kReady) throw py::value_error("replay: nothing was captured yet");
  }

  cpu::Graph graph_;
  std::vector<py::object> tensors_;
  State state_ = State::kNew;
};

template <typename Cpu, typename Cuda>
void OpCall::run(Cpu cpu, [[maybe_unused]] Cuda cuda) {
  if (device_ == DeviceType::kCpu) {
    if (t_recorder != nullptr) {
      t_recorder->record(op_, objects_, num_objects_, std::move(cpu));
      return;
    }
    const GilReleased released;
    cpu();
    return;
  }
  if (t_recorder != nullptr) {
    throw py::value_error(std::string(op_) +
                          ": a CPU graph cannot record CUDA tensors: use torch.cuda.graph");
  }
#ifdef TINYVLLM_WITH_CUDA
  void* stream = nullptr;
  if (g_exchange->current_work_stream(kDLCUDA, device_id_, &stream) != 0) {
    throw py::error_already_set();
  }
  const GilReleased released;
  const cuda::DeviceGuard guard(device_id_);
  cuda(static_cast<cuda::Stream>(stream));
#else
  throw py::value_error(std::string(op_) + ": got CUDA tensors, but this tinyvllm was built " +
                        "without CUDA: reinstall it with nvcc on PATH");
#endif
}

#ifdef TINYVLLM_WITH_CUDA
#define TINYVLLM_CUDA_CALL(call) [=](cuda::Stream stream) { call; }
#else
#define TINYVLLM_CUDA_CALL(call) 0
#endif

// The ops. Shapes and their letters are those of ops.h.

void advance_decode(TensorArg input_ids, TensorArg positions, TensorArg seq_lens,
                    TensorArg step_idx, TensorArg slot_mapping, TensorArg token_ids,
                    TensorArg block_tables, int block_size) {
  OpCall op("advance_decode");
  Dim S("S"), max_blocks("max_blocks");
  const auto row = [&](const char* name, TensorArg arg) {
    return op.tensor(name, arg, {kI32}, {&S}, Layout::kContiguous);
  };
  const Tensor ids = row("input_ids", input_ids);
  const Tensor pos = row("positions", positions);
  const Tensor len = row("seq_lens", seq_lens);
  const Tensor step = row("step_idx", step_idx);
  const Tensor slot = row("slot_mapping", slot_mapping);
  const Tensor drawn = row("token_ids", token_ids);
  const Tensor bt =
      op.tensor("block_tables", block_tables, {kI32}, {&S, &max_blocks}, Layout::kRows);
  if (block_size < 1) op.fail("block_size", "1 or more", std::to_string(block_size));
  op.run([=] { cpu::advance_decode(ids, pos, len, step, slot, drawn, bt, block_size); },
         TINYVLLM_CUDA_CALL(
             cuda::advance_decode(ids, pos, len, step, slot, drawn, bt, block_size, stream)));
}

void embedding(TensorArg out, TensorArg input_ids, TensorArg weight) {
  OpCall op("embedding");
  Dim T("T"), H("H"), V("V");
  const Tensor o = op.tensor("out", out, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor i = op.tensor("input_ids", input_ids, {kI32}, {&T}, Layout::kContiguous);
  const Tensor w = op.tensor("weight", weight, {kBf16}, {&V, &H}, Layout::kRows);
  op.run([=] { cpu::embedding(o, i, w); }, TINYVLLM_CUDA_CALL(cuda::embedding(o, i, w, stream)));
}

void rms_norm(TensorArg out, TensorArg x, TensorArg weight, float eps) {
  OpCall op("rms_norm");
  Dim T("T"), heads("heads"), H("H");
  const bool per_head = op.ndim("out", out) == 3;
  const Shape shape = per_head ? Shape{&T, &heads, &H} : Shape{&T, &H};
  const Tensor o = op.tensor("out", out, {kBf16}, shape, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, shape, Layout::kRows);
  const Tensor w = op.tensor("weight", weight, {kBf16}, {&H}, Layout::kContiguous);
  op.run([=] { cpu::rms_norm(o, i, w, eps); },
         TINYVLLM_CUDA_CALL(cuda::rms_norm(o, i, w, eps, stream)));
}

void add_rms_norm(TensorArg out, TensorArg residual, TensorArg x, TensorArg weight, float eps) {
  OpCall op("add_rms_norm");
  Dim T("T"), H("H");
  const Tensor o = op.tensor("out", out, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor r = op.tensor("residual", residual, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor w = op.tensor("weight", weight, {kBf16}, {&H}, Layout::kContiguous);
  op.run([=] { cpu::add_rms_norm(o, r, i, w, eps); },
         TINYVLLM_CUDA_CALL(cuda::add_rms_norm(o, r, i, w, eps, stream)));
}

void rotary_embedding_store_kv(TensorArg q, TensorArg k, TensorArg v, TensorArg k_cache,
                               TensorArg v_cache, TensorArg cos_sin, TensorArg positions,
                               TensorArg slot_mapping) {
  OpCall op("rotary_embedding_store_kv");
  Dim T("T"), heads("num_heads"), kv_heads("num_kv_heads"), D("head_dim"), P("max_model_len");
  Dim blocks("num_blocks"), block_size("block_size");
  const Shape cache{&blocks, &block_size, &kv_heads, &D};
  const Tensor tq = op.tensor("q", q, {kBf16}, {&T, &heads, &D}, Layout::kTokens);
  const Tensor tk = op.tensor("k", k, {kBf16}, {&T, &kv_heads, &D}, Layout::kTokens);
  const Tensor tv = op.tensor("v", v, {kBf16}, {&T, &kv_heads, &D}, Layout::kTokens);
  const Tensor kc = op.tensor("k_cache", k_cache, {kBf16}, cache, Layout::kContiguous);
  const Tensor vc = op.tensor("v_cache", v_cache, {kBf16}, cache, Layout::kContiguous);
  const Tensor cs = op.tensor("cos_sin", cos_sin, {kF32}, {&P, &D}, Layout::kContiguous);
  const Tensor p = op.tensor("positions", positions, {kI32}, {&T}, Layout::kContiguous);
  const Tensor s = op.tensor("slot_mapping", slot_mapping, {kI32}, {&T}, Layout::kContiguous);
  if (D.size % 2 != 0) op.fail("q", "an even head_dim", std::to_string(D.size));
  op.run([=] { cpu::rotary_embedding_store_kv(tq, tk, tv, kc, vc, cs, p, s); },
         TINYVLLM_CUDA_CALL(cuda::rotary_embedding_store_kv(tq, tk, tv, kc, vc, cs, p, s, stream)));
}

void paged_attention(TensorArg out, TensorArg q, TensorArg k_cache, TensorArg v_cache,
                     TensorArg block_tables, TensorArg cu_seqlens_q, TensorArg seq_lens,
                     float softmax_scale, int sliding_window) {
  OpCall op("paged_attention");
  Dim T("T"), S("S"), heads("num_heads"), kv_heads("num_kv_heads"), D("head_dim");
  Dim blocks("num_blocks"), block_size("block_size"), max_blocks("max_blocks"), bounds("S+1");
  const Shape cache{&blocks, &block_size, &kv_heads, &D};
  const Tensor o = op.tensor("out", out, {kBf16}, {&T, &heads, &D}, Layout::kTokens);
  const Tensor tq = op.tensor("q", q, {kBf16}, {&T, &heads, &D}, Layout::kTokens);
  const Tensor kc = op.tensor("k_cache", k_cache, {kBf16}, cache, Layout::kContiguous);
  const Tensor vc = op.tensor("v_cache", v_cache, {kBf16}, cache, Layout::kContiguous);
  const Tensor bt =
      op.tensor("block_tables", block_tables, {kI32}, {&S, &max_blocks}, Layout::kRows);
  bounds.size = S.size + 1;
  bounds.bound_by = "block_tables";
  const Tensor cu = op.tensor("cu_seqlens_q", cu_seqlens_q, {kI32}, {&bounds}, Layout::kContiguous);
  const Tensor sl = op.tensor("seq_lens", seq_lens, {kI32}, {&S}, Layout::kContiguous);
  if (kv_heads.size == 0 || heads.size % kv_heads.size != 0) {
    op.fail("q", "num_heads to be a multiple of num_kv_heads",
            std::to_string(heads.size) + " and " + std::to_string(kv_heads.size));
  }
  op.run([=] { cpu::paged_attention(o, tq, kc, vc, bt, cu, sl, softmax_scale, sliding_window); },
         TINYVLLM_CUDA_CALL(cuda::paged_attention(o, tq, kc, vc, bt, cu, sl, softmax_scale,
                                                  sliding_window, stream)));
}

void silu_and_mul(TensorArg out, TensorArg gate_up) {
  OpCall op("silu_and_mul");
  Dim T("T"), I("I"), I2("2I");
  const Tensor o = op.tensor("out", out, {kBf16}, {&T, &I}, Layout::kRows);
  I2.size = 2 * I.size;
  I2.bound_by = "out";
  const Tensor g = op.tensor("gate_up", gate_up, {kBf16}, {&T, &I2}, Layout::kRows);
  op.run([=] { cpu::silu_and_mul(o, g); }, TINYVLLM_CUDA_CALL(cuda::silu_and_mul(o, g, stream)));
}

// The dimensions of a packed weight: 16 rows by 2 inputs on a CPU, by 32 on a GPU.
struct PackedDims {
  Dim strips, groups, rows = 16, inputs;

  PackedDims(int64_t n, int64_t k, int64_t width)
      : strips((n + 15) / 16), groups((k + width - 1) / width), inputs(width) {}
  PackedDims(int64_t n, int64_t k, DeviceType device)
      : PackedDims(n, k, int64_t{device == DeviceType::kCpu ? 2 : 32}) {}
  Shape shape() { return {&strips, &groups, &rows, &inputs}; }
};

void pack_linear(TensorArg packed, TensorArg weight) {
  OpCall op("pack_linear");
  Dim N("N"), K("K");
  const Tensor w = op.tensor("weight", weight, {kBf16}, {&N, &K}, Layout::kRows);
  PackedDims d(N.size, K.size, w.device);
  const Tensor p = op.tensor("packed", packed, {kBf16}, d.shape(), Layout::kContiguous);
  op.run([=] { cpu::pack_linear(p, w); }, TINYVLLM_CUDA_CALL(cuda::pack_linear(p, w, stream)));
}

void linear(TensorArg out, TensorArg x, TensorArg packed, std::optional<TensorArg> bias) {
  OpCall op("linear");
  Dim T("T"), N("N"), K("K");
  const Tensor o = op.tensor("out", out, {kBf16, kF32}, {&T, &N}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &K}, Layout::kRows);
  PackedDims d(N.size, K.size, o.device);
  const Tensor w = op.tensor("packed", packed, {kBf16}, d.shape(), Layout::kContiguous);
  std::optional<Tensor> b;
  if (bias) b = op.tensor("bias", *bias, {kBf16}, {&N}, Layout::kContiguous);
  op.run([=] { cpu::linear(o, i, w, b ? &*b : nullptr); },
         TINYVLLM_CUDA_CALL(cuda::linear(o, i, w, b ? &*b : nullptr, stream)));
}

void gather_rows(TensorArg out, TensorArg x, TensorArg row_idx) {
  OpCall op("gather_rows");
  Dim T("T"), R("R"), H("H");
  const Tensor o = op.tensor("out", out, {kBf16}, {&R, &H}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor r = op.tensor("row_idx", row_idx, {kI32}, {&R}, Layout::kContiguous);
  op.run([=] { cpu::gather_rows(o, i, r); },
         TINYVLLM_CUDA_CALL(cuda::gather_rows(o, i, r, stream)));
}

void sample(TensorArg token_ids, TensorArg logits, TensorArg temperature, TensorArg top_k,
            TensorArg top_p, TensorArg min_p, TensorArg seeds, TensorArg step_idx) {
  OpCall op("sample");
  Dim R("R"), V("V");
  const Tensor t = op.tensor("token_ids", token_ids, {kI32}, {&R}, Layout::kContiguous);
  const Tensor l = op.tensor("logits", logits, {kF32}, {&R, &V}, Layout::kRows);
  const Tensor temp = op.tensor("temperature", temperature, {kF32}, {&R}, Layout::kContiguous);
  const Tensor k = op.tensor("top_k", top_k, {kI32}, {&R}, Layout::kContiguous);
  const Tensor p = op.tensor("top_p", top_p, {kF32}, {&R}, Layout::kContiguous);
  const Tensor m = op.tensor("min_p", min_p, {kF32}, {&R}, Layout::kContiguous);
  const Tensor s = op.tensor("seeds", seeds, {kI64}, {&R}, Layout::kContiguous);
  const Tensor n = op.tensor("step_idx", step_idx, {kI32}, {&R}, Layout::kContiguous);
  if (V.size == 0) op.fail("logits", "at least one token in the vocabulary", "V = 0");
  op.run([=] { cpu::sample(t, l, temp, k, p, m, s, n); },
         TINYVLLM_CUDA_CALL(cuda::sample(t, l, temp, k, p, m, s, n, stream)));
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const cpu::Isa isa :
       {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Bf16}) {
    if (cpu::isa_available(isa)) names.push_back(cpu::isa_name(isa));
  }
  return names;
}

void set_num_threads(int n) {
  if (n < 1) {
    throw py::value_error("set_num_threads: n: expected 1 or more, got " + std::to_string(n));
  }
  const GilReleased released;
  cpu::set_num_threads(n);
}

int num_cuda_devices() {
#ifdef TINYVLLM_WITH_CUDA
  return cuda::num_devices();
#else
  return 0;
#endif
}

}  // namespace
}  // namespace tinyvllm

PYBIND11_MODULE(_C, m) {
  using namespace tinyvllm;  // NOLINT
  m.doc() = "Kernels of tinyvllm. Tensors are torch.Tensor; shapes are documented in csrc/ops.h.";

  m.def("advance_decode", &advance_decode, py::arg("input_ids"), py::arg("positions"),
        py::arg("seq_lens"), py::arg("step_idx"), py::arg("slot_mapping"), py::arg("token_ids"),
        py::arg("block_tables"), py::arg("block_size"));
  m.def("embedding", &embedding, py::arg("out"), py::arg("input_ids"), py::arg("weight"));
  m.def("rms_norm", &rms_norm, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("eps"));
  m.def("add_rms_norm", &add_rms_norm, py::arg("out"), py::arg("residual"), py::arg("x"),
        py::arg("weight"), py::arg("eps"));
  m.def("rotary_embedding_store_kv", &rotary_embedding_store_kv, py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("k_cache"), py::arg("v_cache"), py::arg("cos_sin"),
        py::arg("positions"), py::arg("slot_mapping"));
  m.def("paged_attention", &paged_attention, py::arg("out"), py::arg("q"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("block_tables"), py::arg("cu_seqlens_q"), py::arg("seq_lens"),
        py::arg("softmax_scale"), py::arg("sliding_window"));
  m.def("silu_and_mul", &silu_and_mul, py::arg("out"), py::arg("gate_up"));
  m.def("pack_linear", &pack_linear, py::arg("packed"), py::arg("weight"));
  m.def("linear", &linear, py::arg("out"), py::arg("x"), py::arg("packed"),
        py::arg("bias") = py::none());
  m.def("gather_rows", &gather_rows, py::arg("out"), py::arg("x"), py::arg("row_idx"));
  m.def("sample", &sample, py::arg("token_ids"), py::arg("logits"), py::arg("temperature"),
        py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("seeds"),
        py::arg("step_idx"));

  py::class_<GraphRecorder>(m, "Graph",
                            "CPU ops called inside `with Graph() as graph:` are recorded, not run; "
                            "graph.replay() runs them on what their tensors then hold.")
      .def(py::init<>())
      .def("__enter__",
           [](py::object self) {
             self.cast<GraphRecorder&>().enter();
             return self;
           })
      .def("__exit__", [](GraphRecorder& self, py::handle type, py::handle,
                          py::handle) { self.exit(!type.is_none()); })
      .def("replay", &GraphRecorder::replay)
      .def("replay_timed", &GraphRecorder::replay_timed)
      .def_property_readonly("num_ops", &GraphRecorder::num_ops);

  m.def("isa", [] { return cpu::isa_name(cpu::isa()); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &cpu::set_isa, py::arg("name"));
  m.def("num_threads", &cpu::num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("n"));
#ifdef TINYVLLM_WITH_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def("num_cuda_devices", &num_cuda_devices);
}
