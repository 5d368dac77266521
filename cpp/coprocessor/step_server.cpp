#include "coprocessor/step_server.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "kernels/number_formats.h"

namespace offload {
namespace {

constexpr size_t kManyRows = 8;  // from here on the pool copies K/V; below, one thread is as fast

}  // namespace

StepServer::StepServer(DecodeAttention& attention, const Mailbox& mailbox, StepPlan plan)
    : attention_(attention), trace_(attention.trace()), mailbox_(mailbox), plan_(std::move(plan)) {
  options_.window_on_device = true;
  options_.sink_tokens = plan_.sink_tokens;
  options_.recent_tokens = plan_.recent_tokens;
  options_.float_output = true;
  options_.defers_updates = true;
  for (const Request& request : plan_.requests) {
    const uint8_t* hot = request.of_experts ? nullptr : of_layer(plan_.device_heads.hot, request.layer_idx);
    is_ahead_.push_back(hot != nullptr && std::any_of(hot, hot + attention.shape().num_kv_heads, std::identity{}));
  }
}

void StepServer::begin(const ServedStep& step) {
  step_ = &step;
  num_stored_.assign(step.rows.size(), 0);
  num_taken_over_.assign(step.rows.size(), 0);
  num_checked_ = 0;
  // The last step may have been of another mailbox, which is gone since.
  attention_.forget_published();
  attention_.drop_probes();
  attention_.take_failure();  // nor is the last step's of interest
}

const uint8_t* StepServer::of_layer(const std::vector<uint8_t>& heads, int64_t layer_idx) const {
  return heads.empty() ? nullptr : heads.data() + layer_idx * attention_.shape().num_kv_heads;
}

// What the GPU published in layers before `end_layer` is what units of the layers below inherit.
std::string StepServer::take_over(size_t first, size_t last, int64_t end_layer) {
  if (plan_.device_heads.published.empty()) return {};
  const int heads = attention_.shape().num_kv_heads;
  const int per_head = attention_.num_units() / heads;
  for (size_t row = first; row < last; ++row) {
    const StepRow& of_step = step_->rows[row];
    for (int64_t& layer_idx = num_taken_over_[row]; layer_idx < end_layer; ++layer_idx) {
      for (int h = 0; h < heads; ++h) {
        if (plan_.device_heads.published[static_cast<size_t>(layer_idx * heads + h)] == 0) continue;
        const int64_t list =
            of_step.slot * mailbox_.selection_units + std::min<int64_t>(h, mailbox_.selection_units - 1);
        // The GPU may already be publishing what the head chose in the layer that is asked for.
        auto& count = const_cast<int32_t&>(mailbox_.counts[list]);
        const int64_t n = std::atomic_ref<int32_t>(count).load(std::memory_order_relaxed);
        const int unit = h * per_head;
        if (n < 0 || n > mailbox_.selection_tokens) {
          return attention_.non_finite(layer_idx, static_cast<int>(row - first), unit);
        }
        for (int u = unit; u < unit + per_head; ++u) {
          attention_.publish(static_cast<int>(row), u, mailbox_.selection + list * mailbox_.selection_tokens, n);
        }
      }
    }
  }
  return {};
}

// Rows of a step are sorted by slot, so those of a request follow each other.
size_t StepServer::rows_of(int request, std::vector<QueryRow>& rows) const {
  const AttentionShape& shape = attention_.shape();
  const Request& r = plan_.requests[static_cast<size_t>(request)];
  const int64_t elements = int64_t{shape.num_qo_heads} * shape.head_dim;
  const bool ahead = is_ahead(request);
  if (ahead) grow(no_output_, step_->rows.size() * static_cast<size_t>(elements));
  rows.clear();
  size_t first = 0;
  for (const StepRow& of_step : step_->rows) {
    if (of_step.slot < r.first_row) ++first;
    if (of_step.slot < r.first_row || of_step.slot >= r.first_row + r.num_rows) continue;
    QueryRow row{};
    row.pages = of_step.page_table + r.layer_idx * of_step.table_stride;
    row.kv_len = of_step.kv_len;
    row.query = mailbox_.query + of_step.slot * elements * dtype_bytes(shape.dtype);
    row.output = mailbox_.output + of_step.slot * elements;
    row.lse = mailbox_.lse + of_step.slot * shape.num_qo_heads;
    row.arrays = of_step.arrays;
    row.text_marks = of_step.text_marks;
    row.listed = mailbox_.selection + of_step.slot * mailbox_.selection_units * mailbox_.selection_tokens;
    row.num_listed = mailbox_.counts + of_step.slot * mailbox_.selection_units;
    row.max_listed = mailbox_.selection_tokens;
    if (ahead) {  // of the tokens before the step's own, which has no key of this layer yet
      const int64_t at = r.layer_idx % 2 * mailbox_.max_rows + of_step.slot;
      row.kv_len = std::max<int64_t>(1, of_step.kv_len - 1);
      row.query = mailbox_.predicted + at * elements * dtype_bytes(shape.dtype);
      row.output = no_output_.data() + rows.size() * static_cast<size_t>(elements);
      row.lse = nullptr;
    }
    rows.push_back(row);
  }
  return first;
}

int StepServer::attention_from(int request) const {
  const auto num = static_cast<int>(plan_.requests.size());
  while (request < num && is_of_experts(request)) ++request;
  return request;
}

void StepServer::run_experts(int request) {
  const Request& r = plan_.requests[static_cast<size_t>(request)];
  const TraceSpan span(trace_, TraceKind::experts, r.layer_idx, request);
  const RoutedMlp& mlp = *plan_.experts[static_cast<size_t>(r.layer_idx)];
  const int64_t bytes = mlp.down->columns() * dtype_bytes(mlp.down->dtype());
  const int64_t k = mlp.choice.per_token, num_experts = mlp.up->num_experts();
  const auto is_here = [&](int64_t expert) { return expert < num_experts; };
  std::vector<int64_t> slots;
  experts_.clear();
  weights_.clear();
  for (const StepRow& row : step_->rows) {
    if (row.slot < r.first_row || row.slot >= r.first_row + r.num_rows) continue;
    const int64_t* const experts = mailbox_.experts + row.slot * k;
    if (std::none_of(experts, experts + k, is_here)) {  // the GPU runs them all
      std::memset(mailbox_.summed + row.slot * bytes, 0, static_cast<size_t>(bytes));
      continue;
    }
    slots.push_back(row.slot);
    experts_.insert(experts_.end(), experts, experts + k);
    weights_.insert(weights_.end(), mailbox_.weights + row.slot * k, mailbox_.weights + (row.slot + 1) * k);
  }
  if (slots.empty()) return;
  normed_.resize(slots.size() * static_cast<size_t>(bytes));
  summed_.resize(normed_.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(normed_.data() + static_cast<int64_t>(i) * bytes, mailbox_.normed + slots[i] * bytes,
                static_cast<size_t>(bytes));
  }
  const RoutedInput input{normed_.data(), static_cast<int64_t>(slots.size()), experts_.data(), weights_.data(), k};
  offload::run_experts(attention_.kernels(), attention_.pool(), *mlp.up, *mlp.down, input, summed_.data());
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(mailbox_.summed + slots[i] * bytes, summed_.data() + static_cast<int64_t>(i) * bytes,
                static_cast<size_t>(bytes));
  }
}

void StepServer::prepare(int request) {
  if (!is_sparse(request)) return;
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::prepare, layer_idx, request);
  rows_of(request, prepared_rows_);
  attention_.prepare(layer_idx, prepared_rows_);
}

void StepServer::store_row(size_t row, int64_t end_layer) {
  const AttentionShape& shape = attention_.shape();
  const StepRow& of_step = step_->rows[row];
  const int64_t head_bytes = shape.head_bytes();
  const int64_t position = of_step.kv_len - 1;
  for (int64_t layer_idx = num_stored_[row]; layer_idx < end_layer; ++layer_idx) {
    const int64_t* pages = of_step.page_table + layer_idx * of_step.table_stride;
    const char* key =
        mailbox_.kv + (layer_idx * mailbox_.max_rows + of_step.slot) * 2 * shape.num_kv_heads * head_bytes;
    const char* value = key + shape.num_kv_heads * head_bytes;
    for (int h = 0; h < shape.num_kv_heads; ++h, key += head_bytes, value += head_bytes) {
      shape.write(attention_.kernels(), shape.keys(pages, h), position, key);
      if (!shape.keys_only) shape.write(attention_.kernels(), shape.values(pages, h), position, value);
    }
  }
  num_stored_[row] = std::max(num_stored_[row], end_layer);
}

void StepServer::store_rows(size_t first, size_t last, int64_t end_layer) {
  if (last - first < kManyRows) {
    for (size_t row = first; row < last; ++row) store_row(row, end_layer);
    return;
  }
  TraceRing* rings = trace_.workers();
  attention_.pool().parallel_for(static_cast<int64_t>(last - first), [&](int64_t task, int worker) {
    const TraceEvent event{TraceKind::store, end_layer - 1, -1, 0, 0, worker, static_cast<int32_t>(task)};
    const TraceSpan span(rings == nullptr ? nullptr : rings + worker, event);
    store_row(first + static_cast<size_t>(task), end_layer);
  });
}

void StepServer::store(int request) {
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::store, layer_idx, request);
  first_ = rows_of(request, rows_);
  store_rows(first_, first_ + rows_.size(), layer_idx + (is_ahead(request) ? 0 : 1));
}

std::string StepServer::attend(int request) {
  if (rows_.empty()) return {};
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::attend, layer_idx, request);
  const bool sparse = is_sparse(request);
  if (sparse && step_->queries != nullptr) keep_queries(request);
  // A request that comes ahead is there before the layer above publishes.
  const int64_t published = std::max<int64_t>(0, layer_idx - (is_ahead(request) ? 1 : 0));
  if (std::string failure = take_over(first_, first_ + rows_.size(), published); !failure.empty()) return failure;
  options_.elsewhere = of_layer(plan_.device_heads.attended, layer_idx);
  options_.listed = of_layer(plan_.device_heads.listed, layer_idx);
  options_.chooses_only = is_ahead(request);
  options_.max_chosen = mailbox_.fetch_tokens;
  std::string failure = attention_.attend(layer_idx, rows_, sparse, static_cast<int>(first_), false, options_);
  if (failure.empty() && is_ahead(request)) send_hot_rows(layer_idx);
  if (failure.empty()) return failure;
  // What is wrong here may have been wrong above, in heads that are not attended to here.
  const std::string above = find_non_finite(first_, first_ + rows_.size(), 0, layer_idx);
  return above.empty() ? failure : above;
}

// What the GPU fetches for the layer, in whose place; but for what is in its window, the step's own token included.
void StepServer::send_hot_rows(int64_t layer_idx) {
  const int heads = attention_.shape().num_kv_heads;
  const uint8_t* hot = of_layer(plan_.device_heads.hot, layer_idx);
  attention_.pool().parallel_for_near(static_cast<int64_t>(rows_.size()) * heads, [&](int64_t task, int) {
    const auto row = static_cast<size_t>(task / heads);
    const auto head = static_cast<int>(task % heads);
    if (hot[head] == 0) return;
    static thread_local std::vector<int32_t> tokens;
    const StepRow& of_step = step_->rows[first_ + row];
    const int64_t begin = plan_.sink_tokens;
    const int64_t end = std::max(begin, of_step.kv_len - plan_.recent_tokens);
    const auto [chosen, n] = attention_.chosen(static_cast<int>(row), head);
    tokens.clear();
    if (chosen == nullptr && n > 0) {
      for (int64_t t = begin; t < end; ++t) tokens.push_back(static_cast<int32_t>(t));
    } else if (n > 0) {
      const int32_t* first = std::lower_bound(chosen, chosen + n, static_cast<int32_t>(begin));
      tokens.assign(first, std::lower_bound(first, chosen + n, static_cast<int32_t>(end)));
    }
    const int64_t at = (layer_idx % 2 * mailbox_.max_rows + of_step.slot) * heads + head;
    const auto count = std::min<int64_t>(static_cast<int64_t>(tokens.size()), mailbox_.fetch_tokens);
    auto* fetches = reinterpret_cast<Fetch*>(mailbox_.fetches + at * mailbox_.fetch_tokens * 2);
    HotRows& rows = *plan_.hot_rows;
    EstimateArrays rest{};
    const bool has_clusters = attention_.take_in(static_cast<int>(row), head, of_step.kv_len, &rest);
    const bool estimates = has_clusters && mailbox_.rest_counts != nullptr && rows.estimates(of_step.slot);
    const uint8_t* const cluster_of = estimates ? rest.cluster_of : nullptr;
    mailbox_.hot_counts[2 * at] =
        static_cast<int32_t>(rows.choose(of_step.slot, layer_idx, head, tokens.data(), count, fetches, cluster_of));
    mailbox_.hot_counts[2 * at + 1] = static_cast<int32_t>(rows.num_hot(of_step.slot, layer_idx, head));
    if (mailbox_.rest_counts == nullptr) return;
    if (estimates) return send_rest(of_step, at, rows.hot_in_clusters(of_step.slot, layer_idx, head), rest);
    const int64_t clusters = attention_.estimate_clusters();
    int32_t* const counts = mailbox_.rest_counts + at * (clusters + 1);
    std::fill_n(counts, clusters, 0);
    counts[clusters] = -1;
  });
}

// What stands for the tokens that the GPU does not attend to; `hot` are those of each cluster that it does.
void StepServer::send_rest(const StepRow& of_step, int64_t at, const int32_t* hot, const EstimateArrays& rest) const {
  const int64_t clusters = attention_.estimate_clusters(), dim = attention_.shape().head_dim;
  int32_t* const counts = mailbox_.rest_counts + at * (clusters + 1);
  for (int64_t c = 0; c < clusters; ++c) counts[c] = rest.counts[c] - hot[c];
  const int64_t recent = std::max(plan_.sink_tokens, of_step.kv_len - plan_.recent_tokens);
  for (int64_t t = recent; t < rest.header->end; ++t) --counts[rest.cluster_of[t]];  // after others were cropped
  const int64_t grown = rest.header->taken > 0 ? rest.header->cluster : -1;
  counts[clusters] = static_cast<int32_t>(grown);
  if (grown < 0) return;
  float* const means = mailbox_.rest_means + at * 2 * dim;
  std::copy_n(rest.keys + grown * dim, dim, means);
  std::copy_n(rest.values + grown * dim, dim, means + dim);
}

// Before the reply: the GPU writes the next layer's queries after it.
void StepServer::keep_queries(int request) {
  const int64_t layer_idx = layer_of(request);
  const AttentionShape& shape = attention_.shape();
  const int64_t bytes = shape.num_qo_heads * shape.head_bytes();
  const auto num_rows = static_cast<int64_t>(step_->rows.size());
  for (size_t i = 0; i < rows_.size(); ++i) {
    const int64_t row = step_->query_rows[first_ + i];
    std::memcpy(step_->queries + (layer_idx * num_rows + row) * bytes, rows_[i].query, static_cast<size_t>(bytes));
  }
}

void StepServer::update(int request) {
  if (rows_.empty() || !is_sparse(request)) return;
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::update, layer_idx, request);
  attention_.update();
}

void StepServer::update_and_prepare_next(int request) {
  const int next = attention_from(request + 1);
  const bool is_last = next == static_cast<int>(plan_.requests.size());
  if (is_last || rows_.empty() || !is_sparse(request) || !is_sparse(next)) {
    update(request);
    if (!is_last) prepare(next);
    return;
  }
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::update, layer_idx, request);
  rows_of(next, prepared_rows_);
  attention_.update_and_prepare(layer_of(next), prepared_rows_);
}

void StepServer::remember(int request) {
  if (rows_.empty() || !is_sparse(request) || is_ahead(request)) return;
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::warm, layer_idx, request);
  attention_.remember();
}

void StepServer::warm_up(int request, int32_t* stop) {
  if (!is_sparse(request) || is_ahead(request)) return;
  const int64_t layer_idx = layer_of(request);
  const TraceSpan span(trace_, TraceKind::warm, layer_idx, request);
  const size_t first = rows_of(request, prepared_rows_);
  attention_.warm_up(layer_idx, prepared_rows_, static_cast<int>(first), stop,
                     of_layer(plan_.device_heads.attended, layer_idx));
}

std::string StepServer::find_non_finite(size_t first, size_t last, int64_t first_layer, int64_t end_layer) const {
  const AttentionShape& shape = attention_.shape();
  const int64_t bytes = 2 * shape.num_kv_heads * shape.head_bytes();
  const int64_t checked = shape.keys_only ? bytes / 2 : bytes;
  for (int64_t layer_idx = first_layer; layer_idx < end_layer; ++layer_idx) {
    for (size_t row = first; row < last; ++row) {
      const char* kv = mailbox_.kv + (layer_idx * mailbox_.max_rows + step_->rows[row].slot) * bytes;
      if (all_finite(kv, checked, shape.dtype)) continue;
      char text[160];
      std::snprintf(text, sizeof text, "non-finite keys or values in layer %lld, row %zu of the step: %s",
                    static_cast<long long>(layer_idx), row, "NaN or inf above it, in the weights or in the KV cache");
      return text;
    }
  }
  return {};
}

std::string StepServer::check_asked() {
  num_checked_ = 0;
  for (int i = attention_from(0); i < static_cast<int>(plan_.requests.size()); i = attention_from(i + 1)) {
    num_checked_ = layer_of(i) + (is_ahead(i) ? 0 : 1);
  }
  return find_non_finite(0, step_->rows.size(), 0, num_checked_);
}

std::string StepServer::end() {
  const TraceSpan span(trace_, TraceKind::store, -1, -1);
  const auto num_layers = static_cast<int64_t>(plan_.sparse_layers.size());
  store_rows(0, step_->rows.size(), num_layers);
  std::string failure = take_over(0, step_->rows.size(), num_layers);
  if (failure.empty()) failure = find_non_finite(0, step_->rows.size(), num_checked_, num_layers);
  if (failure.empty()) failure = attention_.take_failure();
  step_ = nullptr;
  return failure;
}

}  // namespace offload
