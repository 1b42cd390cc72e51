// A recorded sequence of CPU ops. Each node holds its tensors and scalars by value, so a replay
// costs one indirect call per op; tensor contents are read at replay.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace tinyvllm::cpu {

class Graph {
 public:
  struct OpTime {
    const char* name;
    double seconds;
  };

  // `name` must outlive the graph (a string literal).
  void record(const char* name, std::function<void()> op) {
    nodes_.push_back({name, std::move(op)});
  }
  void clear() { nodes_.clear(); }
  size_t size() const { return nodes_.size(); }

  // Runs the ops in order on the calling thread (each may use the thread pool). An op's exception
  // ends the replay; the ops before it have run.
  void replay() const;
  // The same from op `first` to before op `end`; leaves out what has not run when `cancelled`
  // becomes true.
  void replay(size_t first, size_t end, const std::atomic<bool>& cancelled) const;
  std::vector<OpTime> replay_timed() const;

 private:
  struct Node {
    const char* name;
    std::function<void()> op;
  };
  std::vector<Node> nodes_;
};

}  // namespace tinyvllm::cpu
