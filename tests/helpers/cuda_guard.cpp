// What a torch that was built without CUDA lacks to have tensors on cuda:0: who knows the current
// device and its streams, and that the device is there. tests/helpers/emulated_torch.py does the rest.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

const Device kFirst{DeviceType::CUDA, 0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device) const override { return kFirst; }
    Device getDevice() const override { return kFirst; }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    c10::Stream getStream(Device) const noexcept override {
        return c10::Stream(c10::Stream::DEFAULT, kFirst);
    }
    c10::Stream getNewStream(Device, int) const override { return getStream(kFirst); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kFirst); }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void **, const c10::Stream &, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    void destroyEvent(void *, const DeviceIndex) const noexcept override {}
    bool queryStream(const c10::Stream &) const override { return true; }
    void synchronizeStream(const c10::Stream &) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    int getNumGPUs() const override { return 1; }
    DeviceIndex current_device() const override { return 0; }
    DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
