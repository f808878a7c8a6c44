// A device for tests: torch's PrivateUse1 backend, whose memory is host memory and whose operators run on the CPU.
//
// It refuses what CUDA refuses, operands on different devices, so that a test without a GPU finds a tensor that was
// left behind. There are two devices, pinned memory, and the casts of autocast that CUDA makes.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>

namespace {

constexpr auto kLoom = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> operators{0}, pinned_copies{0};

// Memory

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, at::Device(kLoom, current_device)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // start and size of every piece of pinned memory

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<const char*>(data));
  c10::free_cpu(data);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto piece = std::prev(after);
  return static_cast<const char*>(data) < piece->first + piece->second;
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (storage.nbytes() >= bytes) return;
  at::DataPtr larger = device_allocator.allocate(bytes);
  if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// The devices

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kLoom> {
  at::Device getDevice() const override { return {kLoom, current_device}; }
  at::Device exchangeDevice(at::Device device) const override {
    at::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(at::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "There is no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(at::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(c10::DeviceIndex) const override {}  // operators have ended when they return
  c10::Stream getStream(at::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(at::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kLoom, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kLoom, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
} hooks;

// Operators that cannot fall back: they make memory, move it, or show it in another shape

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(at::Device(kLoom, device && device->has_index() ? device->index() : current_device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(at::Device(kLoom, device && device->has_index() ? device->index() : current_device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           at::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& x) {
  if (!x.is_privateuseone()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), at::TensorOptions(at::kCPU).dtype(x.dtype()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (non_blocking && from.is_cpu() && from.numel() && is_pinned(from.data_ptr())) ++pinned_copies;
  auto alias = on_cpu(to);
  alias.copy_(on_cpu(from));
  return to;
}

const at::Tensor& resize_tensor(const at::Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  grow(x.storage(), (impl->storage_offset() + impl->numel()) * impl->dtype().itemsize());
  return x;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_tensor(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& x, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return x;
}

at::Tensor& set_whole_storage(at::Tensor& x, at::Storage storage) {
  int64_t size = storage.nbytes() / x.dtype().itemsize();
  return set_storage(x, std::move(storage), 0, size, {});
}

at::Scalar item(const at::Tensor& x) { return on_cpu(x).item(); }

// Everything else

void refuse(const c10::OperatorName& name, at::Device one, at::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "! (", name, ")");
}

// The device of an operator's tensors. A number (a CPU tensor without dimensions) may stand among them, and an index.
at::Device common_device(const c10::OperatorName& name, at::ArrayRef<c10::IValue> arguments) {
  bool indexes = name.name.find("index") != std::string::npos;
  std::vector<at::Tensor> strict, free;
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      const auto& x = argument.toTensor();
      if (x.defined()) (x.is_cpu() && x.dim() == 0 ? free : strict).push_back(x);
    } else if (argument.isTensorList()) {
      for (const at::Tensor& x : argument.toTensorVector()) if (x.defined()) strict.push_back(x);
    } else if (argument.isOptionalTensorList()) {
      for (const auto& x : argument.toOptionalTensorVector())
        if (x && x->defined()) (indexes && x->is_cpu() ? free : strict).push_back(*x);
    }
  }
  if (strict.empty()) return {kLoom, current_device};
  for (const auto& x : strict) if (x.device() != strict[0].device()) refuse(name, strict[0].device(), x.device());
  return strict[0].device();
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++operators;
  auto device = common_device(op.operator_name(), torch::jit::last(stack, op.schema().arguments().size()));
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  const auto count = op.schema().returns().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {  // where a number came first, they are on the CPU
    auto& result = (*stack)[i];
    if (result.isTensor() && result.toTensor().defined() && result.toTensor().is_cpu())
      result = result.toTensor().to(device);
  }
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  ++operators;
  if (x.device() != weight.device()) refuse({"aten::convolution", ""}, x.device(), weight.device());
  std::optional<at::Tensor> own_bias;
  if (bias && bias->defined()) own_bias = on_cpu(*bias);
  return at::convolution(on_cpu(x), on_cpu(weight), own_bias, stride, padding, dilation, transposed, output_padding,
                         groups).to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  ++operators;
  at::DimVector bias_size = {gradient.size(1)};
  auto [dx, dw, db] = at::convolution_backward(on_cpu(gradient), on_cpu(x), on_cpu(weight), at::IntArrayRef(bias_size),
                                               stride, padding, dilation, transposed, output_padding, groups, wanted);
  auto back = [&](const at::Tensor& y) { return y.defined() ? y.to(x.device()) : y; };
  return {back(dx), back(dw), back(db)};
}

// Its schema does not say that it writes the running statistics: a fallback would lose them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  ++operators;
  auto alias = [&](const std::optional<at::Tensor>& y) -> std::optional<at::Tensor> {
    if (!y || !y->defined()) return std::nullopt;
    if (y->device() != x.device()) refuse({"aten::native_batch_norm", ""}, x.device(), y->device());
    return on_cpu(*y);
  };
  auto [y, saved_mean, saved_scale] = at::native_batch_norm(on_cpu(x), alias(weight), alias(bias), alias(mean),
                                                            alias(variance), training, momentum, eps);
  return {y.to(x.device()), saved_mean.to(x.device()), saved_scale.to(x.device())};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize_tensor);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
}

TORCH_LIBRARY(loom, m) {
  m.def("operators() -> int", [] { return operators.load(); });
  m.def("pinned_copies() -> int", [] { return pinned_copies.load(); });
  m.def("set_device(int index) -> ()", [](int64_t index) { hooks.setCurrentDevice(static_cast<c10::DeviceIndex>(index)); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device); });
}

struct Registration {
  Registration() {
    c10::SetAllocator(kLoom, &device_allocator);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
} registration;

}  // namespace
