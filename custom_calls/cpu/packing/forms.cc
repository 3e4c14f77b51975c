// The forms that packed weights may have beside the session's dtype: 12 bits, quantized pieces, tiles in the caller's
// memory. Decoder::pack calls `stage` and `settle_form` before and after it copies a weight; api.cc calls `map`.
//
// Invariant: a product has one Form, chosen once all its weights are known. Its results have the same bits in 12 and in
// 16 bits.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../decoder.h"
#include "../worker.h"

namespace laneformer {

// Reserves memory, apart from the streams, for the bf16 products of a weight whose form is not chosen yet. Throws
// std::runtime_error for a weight that is packed already.
void Decoder::stage(int weight) {
  for (const Rows& rows : places_[weight]) {
    if (rows.product->dtype != Dtype::bf16) continue;
    const std::vector<int>& missing = missing_[rows.product->number];
    if (std::count(missing.begin(), missing.end(), weight) == 0)
      throw std::runtime_error("weight " + std::to_string(weight) + " is packed already: in 12 bits pack it only once");
    for (auto& worker : workers_) worker->weights.stage(*rows.product);
  }
}

// Chooses the forms of the products whose last weight this is.
void Decoder::settle_form(int weight) {
  for (const Rows& rows : places_[weight]) {
    if (rows.product->dtype != Dtype::bf16) continue;
    std::vector<int>& missing = missing_[rows.product->number];
    missing.erase(std::find(missing.begin(), missing.end(), weight));
    if (missing.empty()) choose_form(*rows.product);
  }
}

// Chooses a product's form by the counts of all workers, and packs its tiles in this form. All its weights share one
// table of codes.
void Decoder::choose_form(const Product& product) {
  std::vector<Bf12Counts> counts(workers_.size(), Bf12Counts{});
  on_all([&](int w) { workers_[w]->weights.count(product, counts[w]); });
  for (size_t w = 1; w < counts.size(); w++)
    for (size_t i = 0; i < counts[0].size(); i++) counts[0][i] += counts[w][i];
  const Bf12Codes codes(counts[0]);
  Form& form = state_.forms[product.number];
  form.weights = codes.weights;
  form.exceptions = codes.exceptions;
  form.bf12 = (double)codes.exceptions <= kMostExceptions * (double)codes.weights;
  std::copy(std::begin(codes.high), std::end(codes.high), form.table);
  if (!product.experts) {
    on_all([&](int w) { workers_[w]->weights.place(product, form.bf12 ? &codes : nullptr); });
  } else if (form.bf12) {
    encode_experts(product, codes, form);
  }
}

// Encodes the tiles of all experts in one place, with one list of exceptions, since any worker may multiply any expert.
void Decoder::encode_experts(const Product& product, const Bf12Codes& codes, Form& form) {
  Region encoded(product.tiles() * bf12_tile_bytes(product.columns));
  std::vector<PackedWeights::Exceptions> found(workers_.size());
  on_all([&](int w) { found[w] = workers_[w]->weights.encode_experts(product, codes, encoded.data); });
  for (const PackedWeights::Exceptions& part : found) {
    for (const uint32_t start : part.starts) form.starts.push_back((uint32_t)form.list.size() + start);
    form.list.insert(form.list.end(), part.list.begin(), part.list.end());
  }
  form.bytes = encoded.bytes + (int64_t)((form.list.size() + form.starts.size()) * sizeof(uint32_t));
  form.experts = std::move(encoded);
  form.mapped = form.experts.data;
}

void Decoder::map(int number, const char* tiles, int64_t bytes, const uint8_t* table, const uint32_t* exceptions,
                  int64_t count) {
  if (!options().bf12)
    throw std::runtime_error("this session was not opened for weights in 12 bits: open it with bf12");
  if (number < kEmbedding || number > state_.head.number)
    throw std::runtime_error("the model has no product " + std::to_string(number));
  Product table_of_rows{};  // the embedding table as if it were a product's matrix
  table_of_rows.matrices = 1, table_of_rows.rows = plan().vocab_size, table_of_rows.columns = plan().hidden_size;
  const Product& product = number == kEmbedding ? table_of_rows : *state_.products[number];
  const int64_t all = product.tiles();
  const int64_t wanted = all * bf12_tile_bytes(product.columns);
  if (bytes != wanted)
    throw std::runtime_error("product " + std::to_string(number) + " needs " + std::to_string(wanted) +
                             " bytes of tiles in 12 bits, got " + std::to_string(bytes));
  if (number != kEmbedding && missing_[number].size() != product.parts.size())
    throw std::runtime_error("product " + std::to_string(number) + " is packed already");
  Form form;
  form.starts = starts_of(exceptions, count, all, product.columns);
  form.list.assign(exceptions, exceptions + count);
  form.bf12 = true;
  form.mapped = tiles;
  form.bytes = bytes + (int64_t)((form.list.size() + form.starts.size()) * sizeof(uint32_t));
  for (int i = 0; i < 16; i++) form.table[i] = (uint8_t)(table[i % 8] | i / 8 << 7);
  form.weights = product.matrices * product.rows * product.unit_tiles() * product.columns;
  form.exceptions = count - all;
  if (number == kEmbedding) {
    state_.mapped_embedding = std::move(form);
    return;
  }
  state_.forms[number] = std::move(form);
  missing_[number].clear();
  if (&product == &state_.head)
    for (auto& worker : workers_) worker->weights.name_head_tiles();
}

void Decoder::map(int number, std::vector<Piece> pieces) {
  if (number < 0 || number > state_.head.number)
    throw std::runtime_error("the model has no product " + std::to_string(number));
  const Product& product = *state_.products[number];
  const std::string name = "product " + std::to_string(number);
  if (&product == &state_.head && plan().embedding.number == plan().head.weight.number)
    throw std::runtime_error("the head is the embedding table, which cannot be quantized");
  int64_t bytes = 0, count = 0;
  for (const Piece& piece : pieces) {
    const int64_t wanted = piece.tiles ? product.matrices * piece.count * tile_bytes(piece.format, piece.columns) : 0;
    if (piece.bytes != wanted)
      throw std::runtime_error(name + " needs " + std::to_string(wanted) + " bytes of tiles in this format, got " +
                               std::to_string(piece.bytes));
    if (!piece.tiles && options().bf12)
      throw std::runtime_error(name + " has quantized and other matrices: open the session without bf12");
    for (const int32_t entry : piece.order)
      if (entry >= product.columns) throw std::runtime_error(name + " has no column " + std::to_string(entry));
    bytes += wanted, count += piece.count;
  }
  const int64_t all = product.units() * product.unit_tiles();
  if (count != all)
    throw std::runtime_error(name + " needs " + std::to_string(all) + " tiles per matrix, got " +
                             std::to_string(count));
  Form& form = state_.forms[number];
  Region experts = std::move(form.experts);  // still used by pieces that are not quantized
  form = Form();
  form.experts = std::move(experts);
  form.pieces = std::move(pieces);
  form.bytes = bytes;
  missing_[number].clear();
  for (auto& worker : workers_) worker->products.use_pieces(product);
}

Decoder::Bf12Weights Decoder::bf12_weights() const {
  Bf12Weights all;
  for (const Product* product : state_.products) {
    const Form& form = state_.forms[product->number];
    if (form.bf12) {
      const int64_t used = std::max(product->used, 1), of = std::max(product->experts, 1);
      all.weights += form.weights / of * used;
      all.exceptions += form.exceptions * used / of;
      all.matrices++;
    } else {
      all.left += form.weights > 0;
    }
  }
  return all;
}

int64_t Decoder::packed_bytes() const {
  int64_t bytes = state_.embedding.bytes + state_.mapped_embedding.bytes;
  for (const Form& form : state_.forms) bytes += form.bytes;
  for (const auto& worker : workers_) bytes += worker->weights.bytes();
  return bytes;
}

}  // namespace laneformer
