// What a device is and can do.
#include <cstring>

#include "api.h"

namespace lmc {
namespace {

struct Attribute {
    int cuda, hip; // 0: this driver has no such number
};

constexpr Attribute kMajor = {75, 23}, kMinor = {76, 61}, kIntegrated = {18, 16}, kHostRegister = {99, 0},
                    kVmm = {102, 0}, kDescriptors = {103, 0}, kMemOps = {122, 10013};

int attribute(const Attribute &which, int handle, int unknown)
{
    const int number = driver().kind == kRocm ? which.hip : which.cuda;
    int value = 0;
    if (!number || driver().device_attribute(&value, number, handle)) // a driver that knows no such attribute
        return unknown;
    return value;
}

bool has_vmm_entries()
{
    const Driver &api = driver();
    return api.vmm_granularity && api.vmm_reserve && api.vmm_create && api.vmm_map && api.vmm_access &&
           api.vmm_export && api.vmm_import;
}

// HIP has the name of the architecture in a structure that grows with every release, and nowhere else.
std::string amd_architecture(int handle)
{
    std::string room(16384, '\0');
    if (!driver().device_properties || driver().device_properties(&room[0], handle))
        return "gfx";
    for (size_t at = room.find("gfx"); at != std::string::npos; at = room.find("gfx", at + 1)) {
        const std::string found = room.substr(at, std::strcspn(&room[at], ":"));
        if (found.size() > 5 && found.size() < 9)
            return found;
    }
    return "gfx";
}

std::string upper(std::string text)
{
    for (char &letter : text)
        if (letter >= 'a' && letter <= 'z')
            letter = static_cast<char>(letter - 'a' + 'A');
    return text;
}

} // namespace

int device_count()
{
    int count = 0;
    const int code = driver().device_count(&count);
    if (code == LMC_NO_DEVICE)
        return 0;
    check(code, entry_device_count);
    return count;
}

DeviceInfo device_info(int ordinal)
{
    const int count = device_count();
    if (ordinal < 0 || ordinal >= count)
        throw std::invalid_argument("device " + std::to_string(ordinal) + ": expected 0 to " +
                                    std::to_string(count - 1) + ", the devices that this process sees");
    int handle = 0;
    char name[256] = "", bus[64] = "";
    size_t memory = 0;
    DeviceInfo info;
    info.uuid.assign(16, '\0');
    LMC_CALL(device_get, &handle, ordinal);
    LMC_CALL(device_uuid, &info.uuid[0], handle);
    LMC_CALL(device_name, name, static_cast<int>(sizeof name - 1), handle);
    LMC_CALL(device_pci, bus, static_cast<int>(sizeof bus - 1), handle);
    LMC_CALL(device_memory, &memory, handle);
    info.name = name;
    info.pci_bus_id = upper(bus);
    info.total_memory = memory;
    info.major = attribute(kMajor, handle, 0);
    info.minor = attribute(kMinor, handle, 0);
    info.arch = driver().kind == kRocm ? amd_architecture(handle)
                                       : "sm_" + std::to_string(info.major) + std::to_string(info.minor);
    info.vmm = has_vmm_entries() && attribute(kVmm, handle, 1) != 0;
    info.fd_handles = info.vmm && attribute(kDescriptors, handle, 1) != 0;
    info.mem_ops = driver().stream_write && (driver().stream_wait || driver().stream_wait_masked) &&
                   attribute(kMemOps, handle, 0) != 0;
    info.host_register = attribute(kHostRegister, handle, 1) != 0;
    info.integrated = attribute(kIntegrated, handle, 0) != 0;
    return info;
}

bool vmm_supported(int device) { return device_info(device).fd_handles; }

} // namespace lmc
