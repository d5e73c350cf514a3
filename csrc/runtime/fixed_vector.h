// A vector with inline storage for N plain items, so that a launch costs no allocation.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace metal_attn {

template <typename T, std::size_t N>
class FixedVector {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  FixedVector() = default;
  FixedVector(std::initializer_list<T> items) { append(items.begin(), items.end()); }
  template <typename Iterator>
  FixedVector(Iterator first, Iterator last) {
    append(first, last);
  }
  // Copies no uninitialised items.
  FixedVector(const FixedVector& other) { append(other.begin(), other.end()); }
  FixedVector& operator=(const FixedVector& other) {
    if (this != &other) {
      size_ = 0;
      append(other.begin(), other.end());
    }
    return *this;
  }

  // Throws std::length_error if the vector is full.
  void push_back(const T& item) {
    if (size_ == N) {
      throw std::length_error("metal_attn: a launch has over " + std::to_string(N) + " items");
    }
    items_[size_++] = item;
  }
  template <typename Iterator>
  void append(Iterator first, Iterator last) {
    for (; first != last; ++first) { push_back(*first); }
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return items_.data(); }
  const T* data() const { return items_.data(); }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& operator[](std::size_t i) { return items_[i]; }
  const T& operator[](std::size_t i) const { return items_[i]; }
  T& back() { return items_[size_ - 1]; }
  const T& back() const { return items_[size_ - 1]; }

 private:
  std::size_t size_ = 0;
  std::array<T, N> items_;  // from size_ on uninitialised
};

}  // namespace metal_attn
