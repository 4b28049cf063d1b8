// The binding of transfers, plans, and the kernels that compute.
#include <lmcache/transfer.h>

#include "binding.h"

namespace lmc {
namespace {

std::vector<int> formats(bool (*serves)(int))
{
    std::vector<int> ids;
    for (int id = 0; id < 1000; ++id)
        if (lmc_format(id) && serves(id))
            ids.push_back(id);
    return ids;
}

bool has_blocks(int id) { return !lmc_contains(lmc_format(id)->axes, 'T'); }
bool may_be_cut(int id) { return has_blocks(id) && !lmc_format(id)->whole_pages; }

py::tuple as_tuple(const std::vector<int> &ids)
{
    py::tuple made(ids.size());
    for (size_t at = 0; at < ids.size(); ++at)
        made[at] = ids[at];
    return made;
}

// ---------------------------------------------------------------------------------------------------- transfers
TransferCall transfer_call(const char *op, py::handle format, py::handle shape, py::handle direction, int device,
                           u64 stream, py::handle pages, py::handle ids, i64 page_count, i64 id_count,
                           py::handle widths)
{
    TransferCall call = TransferCall();
    call.op = op;
    call.format = small_integer(format, "format");
    call.direction = small_integer(direction, "direction");
    call.device = device;
    call.stream = stream;
    call.shape = shape_of(shape);
    call.pages = table(pages, page_count);
    call.ids = table(ids, id_count);
    for (const u64 width : integers(widths))
        call.widths.push_back(static_cast<int>(width));
    return call;
}

void block_transfer(py::object format, py::object shape, py::object direction, int device, u64 stream,
                    py::object pages, py::object objects, py::object ids, i64 object_slots, i64 skip, i64 page_count,
                    i64 id_count, u64 page_alignment, int plane, py::object widths)
{
    TransferCall call = transfer_call("multi_layer_block_kv_transfer", format, shape, direction, device, stream, pages,
                                      ids, page_count, id_count, widths);
    call.objects = integers(objects);
    call.object_slots = object_slots;
    call.skip = skip;
    call.page_alignment = page_alignment;
    call.plane = plane;
    const py::gil_scoped_release released;
    transfer(call);
}

void slot_transfer(py::object format, py::object shape, py::object direction, int device, u64 stream,
                   py::object pages, u64 object, py::object slots, i64 object_slots, i64 skip, bool token_major,
                   i64 page_count, i64 slot_count, u64 page_alignment, int plane, py::object widths)
{
    TransferCall call = transfer_call("kv_transfer by slots", format, shape, direction, device, stream, pages, slots,
                                      page_count, slot_count, widths);
    call.objects.assign(1, object);
    call.object_slots = object_slots;
    call.skip = skip;
    call.token_major = token_major;
    call.by_slot = true;
    call.page_alignment = page_alignment;
    call.plane = plane;
    const py::gil_scoped_release released;
    transfer(call);
}

// -------------------------------------------------------------------------------------------------------- plans
u64 number(py::handle object, const char *name) { return integer(object.attr(name)); }
i64 signed_number(py::handle object, const char *name) { return static_cast<i64>(number(object, name)); }

Group group_of(py::handle given)
{
    Group made;
    made.pages = number(given, "paged_buffer_ptrs");
    made.objects = integers(given.attr("lmcache_objects_ptrs"));
    made.shape = shape_of_object(given.attr("shape_desc"));
    made.chunk_size = signed_number(given, "lmcache_chunk_size");
    made.format = small_integer(given.attr("engine_kv_format"), "engine_kv_format");
    made.ids = number(given, "block_ids_base");
    made.ids_capacity = signed_number(given, "block_ids_capacity");
    made.page_alignment = py::hasattr(given, "page_alignment") ? number(given, "page_alignment") : 0;
    return made;
}

Step step_of(py::handle given)
{
    Step made;
    for (const py::handle copy : given.attr("staging"))
        made.staging.push_back({number(copy, "dest"), number(copy, "src"), number(copy, "nbytes"),
                                number(copy, "host_offset")});
    for (const py::handle launch : given.attr("launches"))
        made.launches.push_back({signed_number(launch, "group_idx"), signed_number(launch, "block_ids_offset"),
                                 signed_number(launch, "total_blocks"), signed_number(launch, "num_objects"),
                                 signed_number(launch, "skip_prefix_n_blocks")});
    return made;
}

void execute_object_group_transfer(py::object direction, int device, u64 stream, u64 host_alignment,
                                   py::iterable groups, py::iterable steps, bool timed, const std::string &session)
{
    PlanCall call;
    call.direction = small_integer(direction, "direction");
    call.device = device;
    call.stream = stream;
    call.host_alignment = host_alignment;
    for (const py::handle group : groups)
        call.groups.push_back(group_of(group));
    for (const py::handle step : steps)
        call.steps.push_back(step_of(step));
    call.timed = timed;
    call.session = session;
    const py::gil_scoped_release released;
    execute_plan(call);
}

py::list pop_completed_phase_timings()
{
    std::vector<Timing> timings;
    {
        const py::gil_scoped_release released;
        timings = pop_timings();
    }
    py::list made;
    for (const Timing &at : timings)
        made.append(py::make_tuple(at.phase, at.direction, at.device, at.milliseconds, at.nbytes, at.session, at.start,
                                   at.end));
    return made;
}

DirectGroup direct_group(py::handle given)
{
    DirectGroup made;
    made.pages = integers(given.attr("paged_layer_ptrs"));
    made.shape = shape_of_object(given.attr("shape_desc"));
    made.format = small_integer(given.attr("fmt"), "fmt");
    made.slots_per_chunk = signed_number(given, "slots_per_chunk");
    made.offset = signed_number(given, "byte_offset_in_object");
    made.ids = converted<i64>(integers(given.attr("block_ids")));
    return made;
}

DirectObject direct_object(py::handle given)
{
    DirectObject made;
    made.host = number(given, "host_ptr");
    made.host_offset = number(given, "host_offset");
    made.nbytes = number(given, "nbytes");
    made.chunk = signed_number(given, "chunk_idx");
    made.skips = converted<i64>(integers(given.attr("skip_prefix_n_blocks")));
    return made;
}

void execute_direct_copy_transfer(py::object direction, int device, u64 stream, u64 host_alignment, py::iterable groups,
                                  py::iterable objects)
{
    DirectCall call;
    call.direction = small_integer(direction, "direction");
    call.device = device;
    call.stream = stream;
    call.host_alignment = host_alignment;
    for (const py::handle group : groups)
        call.groups.push_back(direct_group(group));
    for (const py::handle object : objects)
        call.objects.push_back(direct_object(object));
    const py::gil_scoped_release released;
    execute_direct(call);
}

// -------------------------------------------------------------------------------------------------------- codec
int index_of(const std::string &word, const std::vector<const char *> &words)
{
    std::string all;
    for (size_t at = 0; at < words.size(); ++at) {
        if (word == words[at])
            return static_cast<int>(at);
        all += (at ? ", " : "") + std::string(words[at]);
    }
    throw py::type_error("type '" + word + "': expected " + all);
}

int int_type(const std::string &word) { return index_of(word, {"uint8", "int8", "int16", "int32", "int64"}); }
int float_type(const std::string &word) { return index_of(word, {"float32", "float16", "bfloat16"}); }

void rotary(int device, u64 stream, u64 old_positions, u64 new_positions, const std::string &position_type, u64 keys,
            const std::string &key_type, u64 table, const std::string &table_type, i64 positions, int tokens, int heads,
            int rotated, i64 token_stride, i64 head_stride, bool is_neox, i64 element_stride)
{
    if (tokens < 0 || heads < 0 || rotated < 0 || rotated % 2 || positions < 0)
        throw std::invalid_argument("rotary: tokens=" + std::to_string(tokens) + ", heads=" + std::to_string(heads) +
                                    ", rotated=" + std::to_string(rotated) +
                                    ": expected 0 or more, and an even number of rotated elements");
    const int positions_are = int_type(position_type);
    if (positions_are != LMC_INT32 && positions_are != LMC_INT64)
        throw py::type_error("positions of '" + position_type + "': expected int32 or int64");
    if (tokens && (!positions || !element_stride)) // to the body 0 means something else
        throw std::invalid_argument("rotary: positions=" + std::to_string(positions) + ", element_stride=" +
                                    std::to_string(element_stride) + ": expected none of them to be 0");
    const lmc_rope rope = {tokens,       heads,       rotated,        is_neox ? 0 : 1,
                           token_stride, head_stride, element_stride, positions};
    const lmc_rotate parameters = {rope,          old_positions,        new_positions,          keys, table,
                                   positions_are, float_type(key_type), float_type(table_type), 0};
    const py::gil_scoped_release released;
    rotate(parameters, stream, device);
}

lmc_cachegen coder(u64 cdf, int bins, u64 symbols, const std::string &symbol_type, int layers, int tokens, int channels)
{
    if (bins < 2 || bins > 65536 || layers < 0 || tokens < 0 || channels < 0 ||
        static_cast<i64>(layers) * channels > 1 << 30)
        throw std::invalid_argument("cachegen: bins=" + std::to_string(bins) + ", [" + std::to_string(layers) + ", " +
                                    std::to_string(tokens) + ", " + std::to_string(channels) +
                                    "]: expected 2 to 65536 bins, and at most 2**30 streams");
    lmc_cachegen made = lmc_cachegen();
    made.cdf = cdf;
    made.bins = bins;
    made.symbols = symbols;
    made.symbol_type = int_type(symbol_type);
    made.layers = layers;
    made.tokens = tokens;
    made.channels = channels;
    return made;
}

void cachegen_cdf(int device, u64 stream, u64 symbols, const std::string &type, int layers, int tokens, int channels,
                  int bins, u64 counts, u64 cdf, u64 status)
{
    lmc_cachegen made = coder(cdf, bins, symbols, type, layers, tokens, channels);
    made.counts = counts;
    made.status = status;
    const py::gil_scoped_release released;
    cachegen(kernel_lmcache_cdf, made, stream, device);
}

void cachegen_measure(int device, u64 stream, u64 cdf, int bins, u64 symbols, const std::string &type, int layers,
                      int tokens, int channels, u64 sizes, u64 status)
{
    lmc_cachegen made = coder(cdf, bins, symbols, type, layers, tokens, channels);
    made.sizes = sizes;
    made.status = status;
    const py::gil_scoped_release released;
    cachegen(kernel_lmcache_measure, made, stream, device);
}

void cachegen_encode(int device, u64 stream, u64 cdf, int bins, u64 symbols, const std::string &type, int layers,
                     int tokens, int channels, u64 sizes, u64 out, i64 capacity)
{
    lmc_cachegen made = coder(cdf, bins, symbols, type, layers, tokens, channels);
    made.sizes = sizes;
    made.data = out;
    made.capacity = capacity;
    const py::gil_scoped_release released;
    cachegen(kernel_lmcache_encode, made, stream, device);
}

void cachegen_decode(int device, u64 stream, u64 cdf, int bins, u64 data, u64 starts, u64 ends, u64 symbols,
                     const std::string &type, int layers, int tokens, int channels, u64 status)
{
    lmc_cachegen made = coder(cdf, bins, symbols, type, layers, tokens, channels);
    made.data = data;
    made.sizes = starts;
    made.ends = ends;
    made.status = status;
    const py::gil_scoped_release released;
    cachegen(kernel_lmcache_decode, made, stream, device);
}

void bind_codec(py::module_ &m)
{
    using namespace py::literals;
    m.def("rotary", rotary, "device"_a, "stream"_a, "old_positions"_a, "new_positions"_a, "position_type"_a, "keys"_a,
          "key_type"_a, "table"_a, "table_type"_a, "positions"_a, "tokens"_a, "heads"_a, "rotated"_a, "token_stride"_a,
          "head_stride"_a, "is_neox"_a, "element_stride"_a = 1);
    m.def("cachegen_cdf", cachegen_cdf, "device"_a, "stream"_a, "symbols"_a, "symbol_type"_a, "layers"_a, "tokens"_a,
          "channels"_a, "bins"_a, "counts"_a, "cdf"_a, "status"_a);
    m.def("cachegen_measure", cachegen_measure, "device"_a, "stream"_a, "cdf"_a, "bins"_a, "symbols"_a, "symbol_type"_a,
          "layers"_a, "tokens"_a, "channels"_a, "sizes"_a, "status"_a);
    m.def("cachegen_encode", cachegen_encode, "device"_a, "stream"_a, "cdf"_a, "bins"_a, "symbols"_a, "symbol_type"_a,
          "layers"_a, "tokens"_a, "channels"_a, "sizes"_a, "out"_a, "capacity"_a);
    m.def("cachegen_decode", cachegen_decode, "device"_a, "stream"_a, "cdf"_a, "bins"_a, "data"_a, "starts"_a, "ends"_a,
          "symbols"_a, "symbol_type"_a, "layers"_a, "tokens"_a, "channels"_a, "status"_a);
    m.attr("CACHEGEN_OK") = static_cast<int>(LMC_STREAM_OK);
    m.attr("CACHEGEN_BAD_CDF") = static_cast<int>(LMC_STREAM_BAD_CDF);
    m.attr("CACHEGEN_BAD_SYMBOL") = static_cast<int>(LMC_STREAM_BAD_SYMBOL);
    m.attr("CACHEGEN_DAMAGED") = static_cast<int>(LMC_STREAM_DAMAGED);
}

} // namespace

void bind_transfers(py::module_ &m)
{
    using namespace py::literals;
    m.attr("BLOCK_FORMATS") = as_tuple(formats(has_blocks));
    m.attr("SLOT_FORMATS") = as_tuple(formats(may_be_cut));
    m.attr("DIRECT_FORMATS") = as_tuple(formats(direct_format));
    m.def("block_transfer", block_transfer, "format"_a, "shape"_a, "direction"_a, "device"_a, "stream"_a, "pages"_a,
          "objects"_a, "ids"_a, "object_slots"_a, "skip"_a = 0, py::kw_only(), "page_count"_a = -1, "id_count"_a = -1,
          "page_alignment"_a = 0, "plane"_a = 0, "widths"_a = py::tuple());
    m.def("slot_transfer", slot_transfer, "format"_a, "shape"_a, "direction"_a, "device"_a, "stream"_a, "pages"_a,
          "object"_a, "slots"_a, "object_slots"_a, "skip"_a = 0, py::kw_only(), "token_major"_a = false,
          "page_count"_a = -1, "slot_count"_a = -1, "page_alignment"_a = 0, "plane"_a = 0, "widths"_a = py::tuple());
    m.def("execute_object_group_transfer", execute_object_group_transfer, "direction"_a, "device"_a, "stream"_a,
          "host_alignment"_a, "groups"_a, "steps"_a, "phase_timing_enabled"_a = false, "session_id"_a = "");
    m.def("pop_completed_phase_timings", pop_completed_phase_timings);
    m.def("execute_direct_copy_transfer", execute_direct_copy_transfer, "direction"_a, "device"_a, "stream"_a,
          "host_alignment"_a, "groups"_a, "objects"_a);
    m.def("direct_copy_format_supported", [](py::object fmt) { return direct_format(small_integer(fmt, "fmt")); },
          "fmt"_a);
    m.def("copy_kernel", copy_kernel, "dst"_a, "src"_a, "nbytes"_a, "stream"_a, "device"_a, Released());
    bind_codec(m);
}

} // namespace lmc
