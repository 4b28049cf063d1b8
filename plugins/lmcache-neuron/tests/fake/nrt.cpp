// A stand-in for libnrt.so.1: tensors are host memory, and calls can be told to fail.
#include <cstddef>
#include <cstring>
#include <vector>

struct nrt_tensor {
    std::vector<unsigned char> data;
};

namespace {
int failing_after = -1, failing_code = 0, calls = 0;

int outcome()
{
    ++calls;
    return failing_after >= 0 && calls > failing_after ? failing_code : 0;
}
} // namespace

extern "C" {

std::size_t nrt_tensor_get_size(const nrt_tensor *tensor) { return tensor->data.size(); }

int nrt_tensor_read(const nrt_tensor *tensor, void *buffer, std::size_t offset, std::size_t size)
{
    const int code = outcome();
    if (!code)
        std::memcpy(buffer, tensor->data.data() + offset, size);
    return code;
}

#ifndef WITHOUT_WRITE
int nrt_tensor_write(nrt_tensor *tensor, const void *buffer, std::size_t offset, std::size_t size)
{
    const int code = outcome();
    if (!code)
        std::memcpy(tensor->data.data() + offset, buffer, size);
    return code;
}
#endif

// For the tests.
nrt_tensor *fake_tensor(std::size_t size) { return new nrt_tensor{std::vector<unsigned char>(size)}; }
unsigned char *fake_data(nrt_tensor *tensor) { return tensor->data.data(); }
void fake_free(nrt_tensor *tensor) { delete tensor; }
void fake_fail(int after, int code) { failing_after = after, failing_code = code, calls = 0; }
int fake_calls() { return calls; }
}
