// Layers of a network, forward and backward, over row-major [batch, width] activations. Sums run in a fixed
// order, so the same input gives the same bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "engine/session/strided.hpp"
#include "engine/support/network.hpp"

namespace accelmgr::test {

/// A matrix of [rows, columns] in memory that the view does not own.
template <class T>
struct View {
  T* data = nullptr;
  std::size_t rows = 0, columns = 0;
  std::size_t row_stride = 0, column_stride = 1;

  T& operator()(std::size_t row, std::size_t column) const {
    return data[row * row_stride + column * column_stride];
  }
  View transposed() const { return {data, columns, rows, column_stride, row_stride}; }
};

/// Activations, or gradients of activations.
template <class T>
struct Matrix {
  Matrix() = default;
  Matrix(std::size_t r, std::size_t c) : rows(r), columns(c), values(r * c) {}

  T& operator()(std::size_t row, std::size_t column) { return values[row * columns + column]; }
  const T& operator()(std::size_t row, std::size_t column) const { return values[row * columns + column]; }

  std::size_t rows = 0, columns = 0;
  std::vector<T> values{};
};

/// The values of a variable. A variable of one dimension is seen as one row.
template <class T>
View<T> values_of(const Variable& v) {
  auto* data = reinterpret_cast<T*>(v.values);
  const auto at = [](const std::vector<std::int64_t>& list, std::size_t i) {
    return static_cast<std::size_t>(list.at(i));
  };
  if (v.shape.size() == 1) return {data, 1, at(v.shape, 0), 0, at(v.strides, 0)};
  return {data, at(v.shape, 0), at(v.shape, 1), at(v.strides, 0), at(v.strides, 1)};
}

/// The gradient of a variable, to add to. Marks the variable as used.
template <class T>
View<T> gradient_of(Variable& v) {
  v.used = true;
  auto view = values_of<T>(v);
  view.data = reinterpret_cast<T*>(v.gradient.data());
  if (session::is_compact(v.shape, v.strides)) return view;
  return {view.data, view.rows, view.columns, view.columns, 1};
}

/// x times weight^T, like torch.nn.functional.linear.
template <class T>
Matrix<T> linear(const Matrix<T>& x, View<T> weight) {
  Matrix<T> y(x.rows, weight.rows);
  for (std::size_t b = 0; b < x.rows; ++b)
    for (std::size_t n = 0; n < weight.rows; ++n) {
      T sum = 0;
      for (std::size_t k = 0; k < x.columns; ++k) sum += x(b, k) * weight(n, k);
      y(b, n) = sum;
    }
  return y;
}

/// Adds to the gradient of the weight; returns the gradient of x.
template <class T>
Matrix<T> linear_backward(const Matrix<T>& dy, const Matrix<T>& x, View<T> weight, View<T> dweight) {
  Matrix<T> dx(x.rows, x.columns);
  for (std::size_t b = 0; b < x.rows; ++b)
    for (std::size_t n = 0; n < weight.rows; ++n) {
      const T d = dy(b, n);
      for (std::size_t k = 0; k < x.columns; ++k) {
        dx(b, k) += d * weight(n, k);
        dweight(n, k) += d * x(b, k);
      }
    }
  return dx;
}

template <class T>
void add_bias(Matrix<T>& x, View<T> bias) {
  for (std::size_t b = 0; b < x.rows; ++b)
    for (std::size_t k = 0; k < x.columns; ++k) x(b, k) += bias(0, k);
}

template <class T>
void bias_backward(const Matrix<T>& dy, View<T> dbias) {
  for (std::size_t b = 0; b < dy.rows; ++b)
    for (std::size_t k = 0; k < dy.columns; ++k) dbias(0, k) += dy(b, k);
}

template <class T>
Matrix<T> tanh_of(const Matrix<T>& x) {
  auto y = x;
  for (auto& value : y.values) value = std::tanh(value);
  return y;
}

/// `y` is the result of tanh_of().
template <class T>
Matrix<T> tanh_backward(Matrix<T> dy, const Matrix<T>& y) {
  for (std::size_t i = 0; i < dy.values.size(); ++i) dy.values[i] *= 1 - y.values[i] * y.values[i];
  return dy;
}

/// Inverted dropout: the values that are kept are scaled up. Forward multiplies x by `mask`; backward
/// multiplies the gradient by it.
template <class T>
Matrix<T> dropout(const Matrix<T>& x, double probability, std::mt19937_64& generator, Matrix<T>& mask) {
  auto y = x;
  mask = Matrix<T>(x.rows, x.columns);
  for (std::size_t i = 0; i < y.values.size(); ++i) {
    const double draw = static_cast<double>(generator() >> 11) * 0x1p-53;
    mask.values[i] = draw < probability ? T(0) : T(1 / (1 - probability));
    y.values[i] *= mask.values[i];
  }
  return y;
}

template <class T>
Matrix<T> dropout_backward(Matrix<T> dy, const Matrix<T>& mask) {
  for (std::size_t i = 0; i < dy.values.size(); ++i) dy.values[i] *= mask.values[i];
  return dy;
}

/// BatchNorm over the rows of a batch (Ioffe, Szegedy, 2015), with torch's momentum and epsilon.
template <class T>
class BatchNorm {
 public:
  /// Updates the running buffers.
  Matrix<T> forward(const Matrix<T>& x, View<T> weight, View<T> bias, View<T> running_mean,
                    View<T> running_var) {
    normalized_ = Matrix<T>(x.rows, x.columns);
    deviation_.assign(x.columns, 0);
    Matrix<T> y(x.rows, x.columns);
    for (std::size_t k = 0; k < x.columns; ++k) {
      const T n = T(x.rows);
      T mean = 0, squares = 0;
      for (std::size_t b = 0; b < x.rows; ++b) mean += x(b, k) / n;
      for (std::size_t b = 0; b < x.rows; ++b) squares += (x(b, k) - mean) * (x(b, k) - mean);
      deviation_[k] = std::sqrt(squares / n + T(epsilon));
      for (std::size_t b = 0; b < x.rows; ++b) {
        normalized_(b, k) = (x(b, k) - mean) / deviation_[k];
        y(b, k) = normalized_(b, k) * weight(0, k) + bias(0, k);
      }
      running_mean(0, k) += T(momentum) * (mean - running_mean(0, k));
      running_var(0, k) += T(momentum) * (squares / std::max(n - 1, T(1)) - running_var(0, k));
    }
    return y;
  }

  Matrix<T> backward(const Matrix<T>& dy, View<T> weight, View<T> dweight, View<T> dbias) const {
    Matrix<T> dx(dy.rows, dy.columns);
    for (std::size_t k = 0; k < dy.columns; ++k) {
      T sum = 0, projection = 0;
      for (std::size_t b = 0; b < dy.rows; ++b) {
        sum += dy(b, k);
        projection += dy(b, k) * normalized_(b, k);
      }
      dbias(0, k) += sum;
      dweight(0, k) += projection;
      const T n = T(dy.rows), scale = weight(0, k) / deviation_[k];
      for (std::size_t b = 0; b < dy.rows; ++b)
        dx(b, k) = scale * (dy(b, k) - sum / n - normalized_(b, k) * projection / n);
    }
    return dx;
  }

 private:
  static constexpr double momentum = 0.1, epsilon = 1e-5;
  Matrix<T> normalized_;
  std::vector<T> deviation_;
};

/// A field of the batch, [elements, width], converted to T.
template <class T>
Matrix<T> matrix_of(const replica::Field& field) {
  const auto columns = field.shape.size() < 2 ? 1 : static_cast<std::size_t>(field.shape[1]);
  Matrix<T> out(static_cast<std::size_t>(field.shape.at(0)), columns);
  const auto read = [&]<class Stored>(Stored) {
    for (std::size_t i = 0; i < out.values.size(); ++i)
      out.values[i] = T(reinterpret_cast<const Stored*>(field.data)[i]);
  };
  field.dtype == DType::float64 ? read(double{}) : read(float{});
  return out;
}

/// Draws from a distribution close to the standard normal one, times `scale`.
template <class T>
void fill_normal(const Variable& variable, double scale, std::mt19937_64& generator) {
  const auto view = values_of<T>(variable);
  for (std::size_t r = 0; r < view.rows; ++r)
    for (std::size_t c = 0; c < view.columns; ++c) {
      double sum = -6;  // A sum of twelve uniform numbers has a variance of 1.
      for (int i = 0; i < 12; ++i) sum += static_cast<double>(generator() >> 11) * 0x1p-53;
      view(r, c) = T(scale * sum);
    }
}

template <class T>
void fill(const Variable& variable, double value) {
  const auto view = values_of<T>(variable);
  for (std::size_t r = 0; r < view.rows; ++r)
    for (std::size_t c = 0; c < view.columns; ++c) view(r, c) = T(value);
}

}  // namespace accelmgr::test
