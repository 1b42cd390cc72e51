// The border between Python and the kernels: the only file that knows pybind11.
//
// A tensor crosses it by the DLPack C exchange API of its framework: one C call fills a view
// (pointer, shape, strides, dtype, device), without a link to libtorch.
// Everything a kernel relies on is checked here, once, in the op's own words; then the op runs with
// the GIL released, or, inside `with Graph():`, is recorded.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/graph.h"
#include "cpu/isa.h"
#include "cpu/stream.h"
#include "cpu/thread_pool.h"
#include "dlpack.h"
#include "ops.h"
#include "tensor.h"
#ifdef TINYVLLM_WITH_CUDA
#include "cuda/device.h"
#include "cuda/token_mailbox.h"
#include "cuda/workspace.h"
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

  static constexpr int kMaxTensors = 11;

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

  // The graph, for a launch that keeps this recorder alive.
  const cpu::Graph* ready_graph() const {
    check_ready();
    return &graph_;
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

// `_C.Launch`: a cpu::Launch, and the Python objects whose memory it uses.
class GraphLaunch {
 public:
  GraphLaunch(std::shared_ptr<cpu::Launch> launch, py::object graph, py::object tensor)
      : launch_(std::move(launch)), graph_(std::move(graph)), tensor_(std::move(tensor)) {}

  // What a launch uses must outlive it, whoever drops it. (A forked child has no such thread.)
  ~GraphLaunch() {
    if (getpid() != pid_) return;
    launch_->cancel();
    try {
      wait();
    } catch (...) {  // it was dropped: nobody asks what became of it
    }
  }

  std::vector<int32_t> result() {
    wait();
    return launch_->result();
  }
  void cancel() { launch_->cancel(); }
  double seconds() const { return launch_->seconds(); }
  double idle_seconds() const { return launch_->idle_seconds(); }

 private:
  void wait() {
    const GilReleased released;
    launch_->wait();
  }

  std::shared_ptr<cpu::Launch> launch_;
  py::object graph_, tensor_;
  const pid_t pid_ = getpid();
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

void take_drawn(TensorArg input_ids, TensorArg token_ids, TensorArg source_rows) {
  OpCall op("take_drawn");
  Dim T("T"), R("R");
  const Tensor i = op.tensor("input_ids", input_ids, {kI32}, {&T}, Layout::kContiguous);
  const Tensor d = op.tensor("token_ids", token_ids, {kI32}, {&R}, Layout::kContiguous);
  const Tensor s = op.tensor("source_rows", source_rows, {kI32}, {&T}, Layout::kContiguous);
  op.run([=] { cpu::take_drawn(i, d, s); }, TINYVLLM_CUDA_CALL(cuda::take_drawn(i, d, s, stream)));
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

// A packed weight of `strips` strips of 16 rows: pieces of 2 inputs on a CPU, of 32 on a GPU.
Tensor packed_tensor(OpCall& op, const char* name, TensorArg arg, int64_t strips, int64_t k,
                     DeviceType device) {
  const int64_t width = device == DeviceType::kCpu ? 2 : 32;
  Dim n_strips(strips), pieces((k + width - 1) / width), rows(16), inputs(width);
  return op.tensor(name, arg, {kBf16}, {&n_strips, &pieces, &rows, &inputs}, Layout::kContiguous);
}

void pack_linear(TensorArg packed, TensorArg weight) {
  OpCall op("pack_linear");
  Dim N("N"), K("K");
  const Tensor w = op.tensor("weight", weight, {kBf16}, {&N, &K}, Layout::kRows);
  const Tensor p = packed_tensor(op, "packed", packed, (N.size + 15) / 16, K.size, w.device);
  op.run([=] { cpu::pack_linear(p, w); }, TINYVLLM_CUDA_CALL(cuda::pack_linear(p, w, stream)));
}

void pack_gated_linear(TensorArg packed, TensorArg weight) {
  OpCall op("pack_gated_linear");
  Dim I2("2I"), K("K");
  const Tensor w = op.tensor("weight", weight, {kBf16}, {&I2, &K}, Layout::kRows);
  if (I2.size % 2 != 0) op.fail("weight", "an even number of rows", std::to_string(I2.size));
  const Tensor p = packed_tensor(op, "packed", packed, (I2.size / 2 + 7) / 8, K.size, w.device);
  op.run([=] { cpu::pack_gated_linear(p, w); },
         TINYVLLM_CUDA_CALL(cuda::pack_gated_linear(p, w, stream)));
}

const Tensor* pointer_to(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

void linear(TensorArg out, TensorArg x, TensorArg packed, std::optional<TensorArg> bias) {
  OpCall op("linear");
  Dim T("T"), N("N"), K("K");
  const Tensor o = op.tensor("out", out, {kBf16, kF32}, {&T, &N}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &K}, Layout::kRows);
  const Tensor w = packed_tensor(op, "packed", packed, (N.size + 15) / 16, K.size, o.device);
  std::optional<Tensor> b;
  if (bias) b = op.tensor("bias", *bias, {kBf16}, {&N}, Layout::kContiguous);
  op.run([=] { cpu::linear(o, i, w, pointer_to(b)); },
         TINYVLLM_CUDA_CALL(cuda::linear(o, i, w, pointer_to(b), stream)));
}

void linear_add(TensorArg residual, TensorArg x, TensorArg packed, std::optional<TensorArg> bias) {
  OpCall op("linear_add");
  Dim T("T"), N("N"), K("K");
  const Tensor r = op.tensor("residual", residual, {kBf16}, {&T, &N}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &K}, Layout::kRows);
  const Tensor w = packed_tensor(op, "packed", packed, (N.size + 15) / 16, K.size, r.device);
  std::optional<Tensor> b;
  if (bias) b = op.tensor("bias", *bias, {kBf16}, {&N}, Layout::kContiguous);
  op.run([=] { cpu::linear_add(r, i, w, pointer_to(b)); },
         TINYVLLM_CUDA_CALL(cuda::linear_add(r, i, w, pointer_to(b), stream)));
}

void norm_linear(TensorArg out, TensorArg normed, TensorArg x, TensorArg norm_weight,
                 TensorArg packed, std::optional<TensorArg> bias, float eps) {
  OpCall op("norm_linear");
  Dim T("T"), N("N"), H("H");
  const Tensor o = op.tensor("out", out, {kBf16, kF32}, {&T, &N}, Layout::kRows);
  const Tensor n = op.tensor("normed", normed, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor g = op.tensor("norm_weight", norm_weight, {kBf16}, {&H}, Layout::kContiguous);
  const Tensor w = packed_tensor(op, "packed", packed, (N.size + 15) / 16, H.size, o.device);
  std::optional<Tensor> b;
  if (bias) b = op.tensor("bias", *bias, {kBf16}, {&N}, Layout::kContiguous);
  op.run([=] { cpu::norm_linear(o, n, i, g, w, pointer_to(b), eps); },
         TINYVLLM_CUDA_CALL(cuda::norm_linear(o, n, i, g, w, pointer_to(b), eps, stream)));
}

void norm_linear_rope_store_kv(TensorArg qkv, TensorArg k_cache, TensorArg v_cache,
                               TensorArg normed, TensorArg x, TensorArg norm_weight,
                               TensorArg packed, std::optional<TensorArg> bias, TensorArg cos_sin,
                               TensorArg positions, TensorArg slot_mapping, float eps) {
  OpCall op("norm_linear_rope_store_kv");
  Dim T("T"), N("(num_heads + 2 num_kv_heads) head_dim"), H("H"), P("max_model_len");
  Dim blocks("num_blocks"), block_size("block_size"), kv_heads("num_kv_heads"), D("head_dim");
  const Shape cache{&blocks, &block_size, &kv_heads, &D};
  const Tensor o = op.tensor("qkv", qkv, {kBf16}, {&T, &N}, Layout::kRows);
  const Tensor kc = op.tensor("k_cache", k_cache, {kBf16}, cache, Layout::kContiguous);
  const Tensor vc = op.tensor("v_cache", v_cache, {kBf16}, cache, Layout::kContiguous);
  const Tensor n = op.tensor("normed", normed, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor g = op.tensor("norm_weight", norm_weight, {kBf16}, {&H}, Layout::kContiguous);
  const Tensor w = packed_tensor(op, "packed", packed, (N.size + 15) / 16, H.size, o.device);
  std::optional<Tensor> b;
  if (bias) b = op.tensor("bias", *bias, {kBf16}, {&N}, Layout::kContiguous);
  const Tensor cs = op.tensor("cos_sin", cos_sin, {kF32}, {&P, &D}, Layout::kContiguous);
  const Tensor p = op.tensor("positions", positions, {kI32}, {&T}, Layout::kContiguous);
  const Tensor s = op.tensor("slot_mapping", slot_mapping, {kI32}, {&T}, Layout::kContiguous);
  if (D.size == 0 || D.size % 2 != 0) {
    op.fail("k_cache", "an even head_dim", std::to_string(D.size));
  }
  const int64_t num_heads = N.size / D.size - 2 * kv_heads.size;
  if (N.size % D.size != 0 || num_heads < 0) {
    op.fail("qkv", "as many columns as its heads and twice those of k_cache have",
            std::to_string(N.size));
  }
  op.run(
      [=] {
        cpu::norm_linear(o, n, i, g, w, pointer_to(b), eps);
        cpu::rotary_embedding_store_kv(
            heads_of(o, 0, num_heads, D.size), heads_of(o, num_heads, kv_heads.size, D.size),
            heads_of(o, num_heads + kv_heads.size, kv_heads.size, D.size), kc, vc, cs, p, s);
      },
      TINYVLLM_CUDA_CALL(cuda::norm_linear_rope_store_kv(o, kc, vc, n, i, g, w, pointer_to(b), cs,
                                                         p, s, eps, stream)));
}

void norm_gated_linear(TensorArg out, TensorArg normed, TensorArg x, TensorArg norm_weight,
                       TensorArg packed, std::optional<TensorArg> bias, float eps) {
  OpCall op("norm_gated_linear");
  Dim T("T"), I("I"), H("H"), I2("2I");
  const Tensor o = op.tensor("out", out, {kBf16}, {&T, &I}, Layout::kRows);
  const Tensor n = op.tensor("normed", normed, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor i = op.tensor("x", x, {kBf16}, {&T, &H}, Layout::kRows);
  const Tensor g = op.tensor("norm_weight", norm_weight, {kBf16}, {&H}, Layout::kContiguous);
  const Tensor w = packed_tensor(op, "packed", packed, (I.size + 7) / 8, H.size, o.device);
  I2.size = 2 * I.size;
  I2.bound_by = "out";
  std::optional<Tensor> b;
  if (bias) b = op.tensor("bias", *bias, {kBf16}, {&I2}, Layout::kContiguous);
  op.run([=] { cpu::norm_gated_linear(o, n, i, g, w, pointer_to(b), eps); },
         TINYVLLM_CUDA_CALL(cuda::norm_gated_linear(o, n, i, g, w, pointer_to(b), eps, stream)));
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

void adjust_logits(TensorArg out, TensorArg logits, TensorArg slot_idx, TensorArg penalties,
                   TensorArg output_counts, TensorArg prompt_mask, TensorArg bias_ids,
                   TensorArg bias_values, TensorArg allowed_mask) {
  OpCall op("adjust_logits");
  Dim R("R"), V("V"), S("S"), three(3), words("ceil(V/32)"), B("B");
  const Tensor o = op.tensor("out", out, {kF32}, {&R, &V}, Layout::kRows);
  const Tensor l = op.tensor("logits", logits, {kF32}, {&R, &V}, Layout::kRows);
  words.size = (V.size + 31) / 32;
  words.bound_by = "out";
  const Tensor s = op.tensor("slot_idx", slot_idx, {kI32}, {&R}, Layout::kContiguous);
  const Tensor p = op.tensor("penalties", penalties, {kF32}, {&S, &three}, Layout::kContiguous);
  const Tensor c = op.tensor("output_counts", output_counts, {kI32}, {&S, &V}, Layout::kRows);
  const Tensor pm = op.tensor("prompt_mask", prompt_mask, {kI32}, {&S, &words}, Layout::kRows);
  const Tensor bi = op.tensor("bias_ids", bias_ids, {kI32}, {&S, &B}, Layout::kRows);
  const Tensor bv = op.tensor("bias_values", bias_values, {kF32}, {&S, &B}, Layout::kRows);
  const Tensor am = op.tensor("allowed_mask", allowed_mask, {kI32}, {&S, &words}, Layout::kRows);
  op.run([=] { cpu::adjust_logits(o, l, s, p, c, pm, bi, bv, am); },
         TINYVLLM_CUDA_CALL(cuda::adjust_logits(o, l, s, p, c, pm, bi, bv, am, stream)));
}

void count_tokens(TensorArg output_counts, TensorArg token_ids, TensorArg slot_idx) {
  OpCall op("count_tokens");
  Dim R("R"), S("S"), V("V");
  const Tensor c = op.tensor("output_counts", output_counts, {kI32}, {&S, &V}, Layout::kRows);
  const Tensor t = op.tensor("token_ids", token_ids, {kI32}, {&R}, Layout::kContiguous);
  const Tensor s = op.tensor("slot_idx", slot_idx, {kI32}, {&R}, Layout::kContiguous);
  op.run([=] { cpu::count_tokens(c, t, s); },
         TINYVLLM_CUDA_CALL(cuda::count_tokens(c, t, s, stream)));
}

void top_logprobs(TensorArg values, TensorArg ids, TensorArg drawn, TensorArg logits,
                  TensorArg token_ids, TensorArg num_logprobs) {
  OpCall op("top_logprobs");
  Dim R("R"), V("V"), K("K");
  const Tensor v = op.tensor("values", values, {kF32}, {&R, &K}, Layout::kRows);
  const Tensor i = op.tensor("ids", ids, {kI32}, {&R, &K}, Layout::kRows);
  const Tensor d = op.tensor("drawn", drawn, {kF32}, {&R}, Layout::kContiguous);
  const Tensor l = op.tensor("logits", logits, {kF32}, {&R, &V}, Layout::kRows);
  const Tensor t = op.tensor("token_ids", token_ids, {kI32}, {&R}, Layout::kContiguous);
  const Tensor n = op.tensor("num_logprobs", num_logprobs, {kI32}, {&R}, Layout::kContiguous);
  if (K.size > cpu::kMaxTopLogprobs) {
    op.fail("values", "at most " + std::to_string(cpu::kMaxTopLogprobs) + " columns",
            std::to_string(K.size));
  }
  op.run([=] { cpu::top_logprobs(v, i, d, l, t, n); },
         TINYVLLM_CUDA_CALL(cuda::top_logprobs(v, i, d, l, t, n, stream)));
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

// The bytes that the calling thread's workspace on the device held.
int64_t release_workspace([[maybe_unused]] int device_id) {
#ifdef TINYVLLM_WITH_CUDA
  const GilReleased released;
  const cuda::DeviceGuard guard(device_id);
  return static_cast<int64_t>(cuda::release_workspace());
#else
  return 0;
#endif
}

#ifdef TINYVLLM_WITH_CUDA
// The words of token_mailbox.h: they lie on the host, so they have an OpCall of their own.
Tensor mailbox_words(const char* name, TensorArg words, int64_t num_tokens) {
  OpCall op(name);
  Dim rows("rows"), columns("max_tokens");
  const Tensor w = op.tensor("words", words, {kI64}, {&rows, &columns}, Layout::kContiguous);
  if (w.device != DeviceType::kCpu) op.fail("words", "a tensor on cpu", device_name(w));
  if (rows.size < 1 || (rows.size & (rows.size - 1)) != 0) {
    op.fail("words", "a power of two of rows", shape_text(w));
  }
  if (num_tokens < 0 || num_tokens > columns.size || columns.size < 1) {
    op.fail("words", "room for " + std::to_string(num_tokens) + " tokens", shape_text(w));
  }
  return w;
}

void publish_tokens(TensorArg words, TensorArg num_steps, TensorArg token_ids, bool after_copies) {
  OpCall op("publish_tokens");
  Dim one(1), R("R");
  const Tensor t = op.tensor("token_ids", token_ids, {kI32}, {&R}, Layout::kContiguous);
  const Tensor n = op.tensor("num_steps", num_steps, {kI32}, {&one}, Layout::kContiguous);
  if (t.device != DeviceType::kCuda) op.fail("token_ids", "a tensor on cuda", device_name(t));
  const Tensor w = mailbox_words("publish_tokens", words, R.size);
  op.run([] {}, [=](cuda::Stream stream) { cuda::publish_tokens(w, n, t, after_copies, stream); });
}

std::vector<int32_t> wait_for_tokens(TensorArg words, uint32_t step, int64_t count,
                                     intptr_t stream) {
  const Tensor w = mailbox_words("wait_for_tokens", words, count);
  const GilReleased released;
  return cuda::wait_for_tokens(w, step, count, reinterpret_cast<cuda::Stream>(stream));
}
#endif

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
  m.def("take_drawn", &take_drawn, py::arg("input_ids"), py::arg("token_ids"),
        py::arg("source_rows"));
  m.def("embedding", &embedding, py::arg("out"), py::arg("input_ids"), py::arg("weight"));
  m.def("rms_norm", &rms_norm, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("eps"));
  m.def("rotary_embedding_store_kv", &rotary_embedding_store_kv, py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("k_cache"), py::arg("v_cache"), py::arg("cos_sin"),
        py::arg("positions"), py::arg("slot_mapping"));
  m.def("paged_attention", &paged_attention, py::arg("out"), py::arg("q"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("block_tables"), py::arg("cu_seqlens_q"), py::arg("seq_lens"),
        py::arg("softmax_scale"), py::arg("sliding_window"));
  m.def("pack_linear", &pack_linear, py::arg("packed"), py::arg("weight"));
  m.def("pack_gated_linear", &pack_gated_linear, py::arg("packed"), py::arg("weight"));
  m.def("linear", &linear, py::arg("out"), py::arg("x"), py::arg("packed"),
        py::arg("bias") = py::none());
  m.def("linear_add", &linear_add, py::arg("residual"), py::arg("x"), py::arg("packed"),
        py::arg("bias") = py::none());
  m.def("norm_linear", &norm_linear, py::arg("out"), py::arg("normed"), py::arg("x"),
        py::arg("norm_weight"), py::arg("packed"), py::arg("bias"), py::arg("eps"));
  m.def("norm_linear_rope_store_kv", &norm_linear_rope_store_kv, py::arg("qkv"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("normed"), py::arg("x"), py::arg("norm_weight"),
        py::arg("packed"), py::arg("bias"), py::arg("cos_sin"), py::arg("positions"),
        py::arg("slot_mapping"), py::arg("eps"));
  m.def("norm_gated_linear", &norm_gated_linear, py::arg("out"), py::arg("normed"), py::arg("x"),
        py::arg("norm_weight"), py::arg("packed"), py::arg("bias"), py::arg("eps"));
  m.def("gather_rows", &gather_rows, py::arg("out"), py::arg("x"), py::arg("row_idx"));
  m.def("sample", &sample, py::arg("token_ids"), py::arg("logits"), py::arg("temperature"),
        py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("seeds"),
        py::arg("step_idx"));
  m.def("adjust_logits", &adjust_logits, py::arg("out"), py::arg("logits"), py::arg("slot_idx"),
        py::arg("penalties"), py::arg("output_counts"), py::arg("prompt_mask"), py::arg("bias_ids"),
        py::arg("bias_values"), py::arg("allowed_mask"));
  m.def("count_tokens", &count_tokens, py::arg("output_counts"), py::arg("token_ids"),
        py::arg("slot_idx"));
  m.def("top_logprobs", &top_logprobs, py::arg("values"), py::arg("ids"), py::arg("drawn"),
        py::arg("logits"), py::arg("token_ids"), py::arg("num_logprobs"));

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

  py::class_<GraphLaunch>(m, "Launch", "One run of a graph on a Stream.")
      .def("result", &GraphLaunch::result)
      .def("cancel", &GraphLaunch::cancel)
      .def_property_readonly("seconds", &GraphLaunch::seconds)
      .def_property_readonly("idle_seconds", &GraphLaunch::idle_seconds);

  py::class_<cpu::Stream>(m, "Stream", "Runs graphs one after the other on a thread of its own.")
      .def(py::init<>())
      .def(
          "launch",
          [](cpu::Stream& stream, py::object graph, py::object result) {
            OpCall op("launch");
            Dim n("n");
            const Tensor t =
                op.tensor("result", TensorArg{result.ptr()}, {kI32}, {&n}, Layout::kContiguous);
            if (t.device != DeviceType::kCpu) op.fail("result", "a tensor on cpu", device_name(t));
            const cpu::Graph* recorded = graph.cast<GraphRecorder&>().ready_graph();
            auto launch = stream.launch(recorded, static_cast<const int32_t*>(t.data), n.size);
            return std::make_unique<GraphLaunch>(std::move(launch), std::move(graph),
                                                 std::move(result));
          },
          py::arg("graph"), py::arg("result"));

  m.def("isa", [] { return cpu::isa_name(cpu::isa()); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &cpu::set_isa, py::arg("name"));
  m.def("num_threads", &cpu::num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("n"));
#ifdef TINYVLLM_WITH_CUDA
  m.def("publish_tokens", &publish_tokens, py::arg("words"), py::arg("num_steps"),
        py::arg("token_ids"), py::arg("after_copies"));
  m.def("wait_for_tokens", &wait_for_tokens, py::arg("words"), py::arg("step"), py::arg("count"),
        py::arg("stream"));
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def("num_cuda_devices", &num_cuda_devices);
  m.def("release_workspace", &release_workspace, py::arg("device_id"));
}
