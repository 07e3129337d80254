// What stands in for XLA and for the driver where the handler runs without a GPU: a call frame as XLA builds one, and a
// libcuda.so.1 whose tensor maps are the arguments they were encoded from. Built and driven by host_launch.py.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

struct Buffer {
  XLA_FFI_Buffer buffer{sizeof(XLA_FFI_Buffer)};
  std::vector<int64_t> dims;
};

struct Attribute {
  XLA_FFI_AttrType type;
  XLA_FFI_ByteSpan name, text;
  XLA_FFI_Scalar scalar;
  XLA_FFI_Array array;
  std::string name_bytes, bytes;
  void* value;
};

/// The arguments of one call, owned.
struct Frame {
  std::deque<Buffer> buffers;
  std::vector<XLA_FFI_ArgType> arg_types;
  std::vector<XLA_FFI_RetType> ret_types;
  std::vector<void*> args, rets, attribute_values;
  std::map<std::string, Attribute> attributes;  // sorted by name, as XLA sorts them
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<XLA_FFI_ByteSpan*> attribute_names;
};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api{};
  api.struct_size = sizeof(api);
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Stream_Get = GetStream;
  return api;
}

XLA_FFI_CallFrame Describe(Frame& frame, int stage) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_CallFrame call{};
  call.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  call.api = &api;
  call.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  const auto size = [](const auto& items) { return static_cast<int64_t>(items.size()); };
  call.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, size(frame.args), frame.arg_types.data(), frame.args.data()};
  call.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, size(frame.rets), frame.ret_types.data(), frame.rets.data()};
  call.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,    nullptr,
                size(frame.attribute_values), frame.attribute_types.data(),
                frame.attribute_names.data(), frame.attribute_values.data()};
  return call;
}

constexpr int kDevices = 3;  // the last one is no Hopper GPU

/// What the stand-in driver was asked for by a thread.
struct Record {
  uint64_t encodings = 0, launches = 0, device_queries = 0;
  uint64_t zeroed_address = 0, zeroed_words = 0, zeroings = 0;  // of the last memset; how many
  uint32_t grid = 0, block = 0, shared_bytes = 0, cluster = 0, begins_early = 0;
  uint32_t shared_limits[kDevices] = {}, loads[kDevices] = {};  // the last limit set, and functions loaded, by device
  uint32_t promotion = 0;                                       // into L2, of the last map that was encoded
  char symbol[32] = {};                                         // of the last kernel that was looked up
  unsigned char parameters[4096] = {};
};
thread_local Record record;
thread_local int device = 0;
size_t parameter_bytes = 0;  // of the kernel, which a driver knows from its image

}  // namespace

extern "C" {

Frame* frame_new() {
  return new Frame;
}
void frame_delete(Frame* frame) {
  delete frame;
}

void frame_buffer(Frame* frame, int result, int dtype, void* data, const int64_t* dims, int rank) {
  Buffer& buffer = frame->buffers.emplace_back();
  buffer.dims.assign(dims, dims + rank);
  buffer.buffer.dtype = static_cast<XLA_FFI_DataType>(dtype);
  buffer.buffer.data = data;
  buffer.buffer.rank = rank;
  buffer.buffer.dims = buffer.dims.data();
  if (result) {
    frame->ret_types.push_back(XLA_FFI_RetType_BUFFER);
    frame->rets.push_back(&buffer.buffer);
  } else {
    frame->arg_types.push_back(XLA_FFI_ArgType_BUFFER);
    frame->args.push_back(&buffer.buffer);
  }
}

void frame_move(Frame* frame, int index, void* data) {
  frame->buffers[index].buffer.data = data;
}

/// `dtype` as XLA's enum, of a scalar or (array 1) of an array's elements; -1: a string.
void frame_attribute(Frame* frame, const char* name, int dtype, int array, const char* bytes, int64_t count,
                     int64_t size_bytes) {
  Attribute& item = frame->attributes[name];
  item.name_bytes = name;
  item.bytes.assign(bytes, size_bytes);
  item.name = {item.name_bytes.data(), item.name_bytes.size()};
  item.text = {item.bytes.data(), item.bytes.size()};
  item.scalar = {static_cast<XLA_FFI_DataType>(dtype), item.bytes.data()};
  item.array = {static_cast<XLA_FFI_DataType>(dtype), static_cast<size_t>(count), item.bytes.data()};
  item.type = dtype < 0 ? XLA_FFI_AttrType_STRING : array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR;
  item.value = dtype < 0 ? static_cast<void*>(&item.text) : array ? static_cast<void*>(&item.array) : &item.scalar;
  frame->attribute_types.clear();
  frame->attribute_names.clear();
  frame->attribute_values.clear();
  for (auto& [_, attribute] : frame->attributes) {
    frame->attribute_types.push_back(attribute.type);
    frame->attribute_names.push_back(&attribute.name);
    frame->attribute_values.push_back(attribute.value);
  }
}

/// The number of bytes of the error's message, which is written to `message`; 0: none.
int frame_call(Frame* frame, XLA_FFI_Handler* handler, int stage, char* message, int capacity) {
  XLA_FFI_CallFrame call = Describe(*frame, stage);
  std::unique_ptr<XLA_FFI_Error> error(handler(&call));
  if (error == nullptr) return 0;
  std::strncpy(message, error->message.c_str(), capacity);
  return static_cast<int>(error->message.size());
}

/// Nanoseconds for a call, of `count` frames in turn: the least of `rounds` means over them, since a machine does other
/// things too; -1: a call failed.
double frames_time(Frame** frames, int count, XLA_FFI_Handler* handler, int stage, int rounds) {
  std::vector<XLA_FFI_CallFrame> calls;
  for (int i = 0; i < count; ++i) calls.push_back(Describe(*frames[i], stage));
  double least = 1e300;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (XLA_FFI_CallFrame& call : calls) {
      if (XLA_FFI_Error* error = handler(&call)) {
        delete error;
        return -1;
      }
    }
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
    least = std::min(least, elapsed.count() / count);
  }
  return least;
}

const Record* driver_record() {
  return &record;
}
void driver_set_device(int ordinal) {
  device = ordinal;
}  // of the calling thread
void driver_set_parameter_bytes(size_t bytes) {
  parameter_bytes = bytes;
}

// The driver.

int cuGetErrorName(int, const char** text) {
  return *text = "CUDA_ERROR_INVALID_VALUE", 0;
}
int cuGetErrorString(int, const char** text) {
  return *text = "invalid argument", 0;
}
int cuCtxGetDevice(int* ordinal) {
  return *ordinal = device, 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
  ++record.device_queries;
  return *value = attribute == 16 ? 132 - 32 * ordinal : attribute == 75 ? (ordinal == kDevices - 1 ? 10 : 9) : 0, 0;
}
int cuLibraryLoadData(void** library, const void*, int*, void**, unsigned, int*, void**, unsigned) {
  return *library = &record, 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  std::strncpy(record.symbol, name, sizeof(record.symbol) - 1);
  return *kernel = &record, 0;
}
int cuKernelGetFunction(void** function, void*) {
  ++record.loads[device];
  return *function = &record, 0;
}
int cuKernelSetAttribute(int attribute, int value, void*, int ordinal) {
  if (attribute == 8) record.shared_limits[ordinal] = value;
  return 0;
}

/// The map's bytes: its arguments.
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides_bytes, const uint32_t* box, const uint32_t*, int, int swizzle,
                           int promotion, int) {
  ++record.encodings;
  record.promotion = promotion;
  if (dims[0] == 0 || rank != 4) return 1;
  struct {
    void* address;
    uint64_t dims[4], strides_bytes[3];
    uint32_t box[4];
    int type, swizzle;
  } arguments{};
  static_assert(sizeof(arguments) <= 128);
  arguments.address = address;
  std::memcpy(arguments.dims, dims, sizeof(arguments.dims));
  std::memcpy(arguments.strides_bytes, strides_bytes, sizeof(arguments.strides_bytes));
  std::memcpy(arguments.box, box, sizeof(arguments.box));
  arguments.type = type;
  arguments.swizzle = swizzle;
  std::memset(map, 0, 128);
  std::memcpy(map, &arguments, sizeof(arguments));
  return 0;
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void*) {
  record.zeroed_address = address;
  record.zeroed_words = count;
  ++record.zeroings;
  return value;
}

int cuLaunchKernelEx(const void* config, void*, void** parameters, void**) {
  struct Config {
    uint32_t grid[3], block[3], shared_bytes;
    void* stream;
    const uint32_t (*attributes)[18];
    uint32_t attribute_count;
  } const& launch = *static_cast<const Config*>(config);
  ++record.launches;
  record.grid = launch.grid[0];
  record.block = launch.block[0];
  record.shared_bytes = launch.shared_bytes;
  record.cluster = record.begins_early = 0;
  for (uint32_t i = 0; i < launch.attribute_count; ++i) {
    const uint32_t id = launch.attributes[i][0], value = launch.attributes[i][2];
    if (id == 4 && value == 0) return 1;
    if (id == 4) record.cluster = value;
    if (id == 6) record.begins_early = value;
  }
  std::memcpy(record.parameters, parameters[0], parameter_bytes);
  return 0;
}

}  // extern "C"
