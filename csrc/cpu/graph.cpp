#include "graph.h"

#include <chrono>

namespace tinyvllm::cpu {

void Graph::replay() const {
  for (const Node& node : nodes_) node.op();
}

void Graph::replay(size_t first, size_t end, const std::atomic<bool>& cancelled) const {
  for (size_t i = first; i < end && !cancelled.load(std::memory_order_relaxed); ++i) {
    nodes_[i].op();
  }
}

std::vector<Graph::OpTime> Graph::replay_timed() const {
  using Clock = std::chrono::steady_clock;
  std::vector<OpTime> times;
  times.reserve(nodes_.size());
  Clock::time_point start = Clock::now();
  for (const Node& node : nodes_) {
    node.op();
    const Clock::time_point end = Clock::now();
    times.push_back({node.name, std::chrono::duration<double>(end - start).count()});
    start = end;
  }
  return times;
}

}  // namespace tinyvllm::cpu
