#include "direct.h"

#include <tuple>

namespace graphdispatch {
namespace {

using at::Scalar;
using at::Tensor;
using c10::IValue;
using c10::TypeKind;
using Indices = c10::List<std::optional<Tensor>>;

bool is_kind(const c10::Argument& formal, TypeKind kind) { return formal.real_type()->kind() == kind; }

bool is_written(const c10::Argument& formal) { return formal.alias_info() && formal.alias_info()->isWrite(); }

bool is_list_of(const c10::Argument& formal, TypeKind element, bool is_optional) {
  if (!is_kind(formal, TypeKind::ListType)) return false;
  auto type = formal.real_type()->expectRef<c10::ListType>().getElementType();
  if (is_optional != (type->kind() == TypeKind::OptionalType)) return false;
  return (is_optional ? type->expectRef<c10::OptionalType>().getElementType() : type)->kind() == element;
}

// How a parameter of a C++ signature is known in the schema, kept, and given.
template <class Parameter>
struct Kept;

template <>
struct Kept<const Tensor&> {
  using type = Tensor;
  static bool fits(const c10::Argument& formal) { return is_kind(formal, TypeKind::TensorType) && !is_written(formal); }
  static type take(const IValue& value) { return value.toTensor(); }
};
template <>
struct Kept<Tensor&> {
  using type = Tensor;
  static bool fits(const c10::Argument& formal) { return is_kind(formal, TypeKind::TensorType) && is_written(formal); }
  static type take(const IValue& value) { return value.toTensor(); }
};
template <>
struct Kept<const Scalar&> {
  using type = Scalar;
  static bool fits(const c10::Argument& formal) { return is_kind(formal, TypeKind::NumberType); }
  static type take(const IValue& value) { return value.toScalar(); }
};
template <>
struct Kept<int64_t> {
  using type = int64_t;
  static bool fits(const c10::Argument& formal) { return is_kind(formal, TypeKind::IntType); }
  static type take(const IValue& value) { return value.toInt(); }
};
template <>
struct Kept<bool> {
  using type = bool;
  static bool fits(const c10::Argument& formal) { return is_kind(formal, TypeKind::BoolType); }
  static type take(const IValue& value) { return value.toBool(); }
};
template <>
struct Kept<const at::ITensorListRef&> {
  using type = std::vector<Tensor>;
  static bool fits(const c10::Argument& formal) { return is_list_of(formal, TypeKind::TensorType, false); }
  static type take(const IValue& value) { return value.toTensorVector(); }
};
template <>
struct Kept<const Indices&> {
  using type = Indices;
  static bool fits(const c10::Argument& formal) { return is_list_of(formal, TypeKind::TensorType, true); }
  static type take(const IValue& value) { return value.to<Indices>(); }
};
template <>
struct Kept<at::OptionalIntArrayRef> {
  using type = c10::OptionalArray<int64_t>;
  static bool fits(const c10::Argument& formal) {
    if (!is_kind(formal, TypeKind::OptionalType)) return false;
    const auto& type = formal.real_type()->expectRef<c10::OptionalType>().getElementType();
    return type->kind() == TypeKind::ListType &&
           type->expectRef<c10::ListType>().getElementType()->kind() == TypeKind::IntType;
  }
  static type take(const IValue& value) { return value.isNone() ? type() : type(value.toIntVector()); }
};
template <>
struct Kept<std::optional<at::ScalarType>> {
  using type = std::optional<at::ScalarType>;
  static bool fits(const c10::Argument& formal) {
    return is_kind(formal, TypeKind::OptionalType) &&
           formal.real_type()->expectRef<c10::OptionalType>().getElementType()->kind() == TypeKind::ScalarTypeType;
  }
  static type take(const IValue& value) { return value.toOptional<at::ScalarType>(); }
};

template <class Signature>
class Call;

template <class... Parameters>
class Call<Tensor&(Parameters...)> final : public DirectCall {
 public:
  static std::unique_ptr<DirectCall> make(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
    if (arguments.size() != sizeof...(Parameters)) return nullptr;
    return make(op, arguments, std::index_sequence_for<Parameters...>());
  }
  void run() override {
    std::apply([this](typename Kept<Parameters>::type&... kept) { op_.call(kept...); }, kept_);
  }

 private:
  using Handle = c10::TypedOperatorHandle<Tensor&(Parameters...)>;
  using Tuple = std::tuple<typename Kept<Parameters>::type...>;

  Call(Handle op, Tuple kept) : op_(op), kept_(std::move(kept)) {}

  template <size_t... Index>
  static std::unique_ptr<DirectCall> make(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                          std::index_sequence<Index...>) {
    const auto& formals = op.schema().arguments();
    if (!(Kept<Parameters>::fits(formals[Index]) && ...)) return nullptr;
    try {
      return std::unique_ptr<DirectCall>(
          new Call(op.typed<Tensor&(Parameters...)>(), Tuple(Kept<Parameters>::take(arguments[Index])...)));
    } catch (const c10::Error&) {  // its kernels have another signature
      return nullptr;
    }
  }

  Handle op_;
  Tuple kept_;
};

template <class... Signatures>
std::unique_ptr<DirectCall> first(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  std::unique_ptr<DirectCall> made;
  (void)((made = Call<Signatures>::make(op, arguments)) || ...);
  return made;
}

}  // namespace

std::unique_ptr<DirectCall> make_direct_call(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const auto& schema = op.schema();
  const bool is_one = schema.returns().size() == 1 && is_written(schema.returns()[0]);
  if (!is_one || schema.name().rfind("aten::", 0) != 0) return nullptr;
  return first<Tensor&(const Tensor&, Tensor&),                                // exp, rsqrt, silu
               Tensor&(const Tensor&, const Tensor&, Tensor&),                 // mul, mm, bmm, eq
               Tensor&(const Tensor&, const Tensor&, const Scalar&, Tensor&),  // add, sub
               Tensor&(const Tensor&, const Scalar&, Tensor&),                 // pow, gt
               Tensor&(const Tensor&, const Tensor&, const Tensor&, Tensor&),  // where
               Tensor&(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&, Tensor&),  // addmm
               Tensor&(const Tensor&, int64_t, bool, Tensor&),                                               // softmax
               Tensor&(const Tensor&, int64_t, const Tensor&, Tensor&),  // index_select
               Tensor&(const Tensor&, const Indices&, Tensor&),          // index
               Tensor&(const Tensor&, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>, Tensor&),  // mean
               Tensor&(const at::ITensorListRef&, int64_t, Tensor&),                                           // cat
               Tensor&(Tensor&, const Tensor&, bool),                                                          // copy_
               Tensor&(Tensor&, const Tensor&),                                                                // mul_
               Tensor&(Tensor&, const Tensor&, const Scalar&),                                                 // add_
               Tensor&(Tensor&, int64_t, const Tensor&, const Tensor&),  // index_copy_
               Tensor&(Tensor&, const Indices&, const Tensor&, bool)     // index_put_
               >(op, arguments);
}

}  // namespace graphdispatch
