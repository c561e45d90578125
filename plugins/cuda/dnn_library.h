/* cuDNN, reached when the plug-in runs. Only its graph interface is used: descriptors with attributes, of which plans are
 * made. The few of its types and numbers that are needed stand here, so that the plug-in is built without its headers; a
 * test compares them with the headers where those are installed. */
#ifndef DNN_LIBRARY_H
#define DNN_LIBRARY_H

#include <tandem/base.h>

#include <pthread.h>

typedef void *dnn_descriptor;

enum dnn_descriptor_kind {
    DNN_CONVOLUTION = 1,
    DNN_ENGINE = 2,
    DNN_ENGINE_CONFIG = 3,
    DNN_HEURISTIC = 4,
    DNN_PLAN = 5,
    DNN_KNOB_CHOICE = 7,
    DNN_FORWARD = 10,
    DNN_GRAD_WEIGHT = 11,
    DNN_GRAD_INPUT = 12,
    DNN_GRAPH = 15,
    DNN_VARIANT_PACK = 16,
    DNN_TENSOR = 17,
};

enum dnn_attribute {
    DNN_CONVOLUTION_COMPUTE_TYPE = 100,
    DNN_CONVOLUTION_MODE = 101,
    DNN_CONVOLUTION_DILATIONS = 102,
    DNN_CONVOLUTION_STRIDES = 103,
    DNN_CONVOLUTION_POST_PADDINGS = 104,
    DNN_CONVOLUTION_PRE_PADDINGS = 105,
    DNN_CONVOLUTION_DIMS = 106,
    DNN_HEURISTIC_MODE = 200,
    DNN_HEURISTIC_GRAPH = 201,
    DNN_HEURISTIC_RESULTS = 202,
    DNN_CONFIG_ENGINE = 300,
    DNN_CONFIG_KNOB_CHOICES = 302,
    DNN_PLAN_HANDLE = 400,
    DNN_PLAN_CONFIG = 401,
    DNN_PLAN_WORKSPACE = 402,
    DNN_KNOB_TYPE = 600,
    DNN_KNOB_VALUE = 601,
    DNN_FORWARD_ALPHA = 700,
    DNN_FORWARD_BETA = 701,
    DNN_FORWARD_CONVOLUTION = 702,
    DNN_FORWARD_W = 703,
    DNN_FORWARD_X = 704,
    DNN_FORWARD_Y = 705,
    DNN_GRAD_INPUT_ALPHA = 706,
    DNN_GRAD_INPUT_BETA = 707,
    DNN_GRAD_INPUT_CONVOLUTION = 708,
    DNN_GRAD_INPUT_W = 709,
    DNN_GRAD_INPUT_DX = 710,
    DNN_GRAD_INPUT_DY = 711,
    DNN_GRAD_WEIGHT_ALPHA = 712,
    DNN_GRAD_WEIGHT_BETA = 713,
    DNN_GRAD_WEIGHT_CONVOLUTION = 714,
    DNN_GRAD_WEIGHT_DW = 715,
    DNN_GRAD_WEIGHT_X = 716,
    DNN_GRAD_WEIGHT_DY = 717,
    DNN_GRAPH_HANDLE = 800,
    DNN_GRAPH_OPERATIONS = 801,
    DNN_TENSOR_ALIGNMENT = 900,
    DNN_TENSOR_TYPE = 901,
    DNN_TENSOR_SIZES = 902,
    DNN_TENSOR_STRIDES = 903,
    DNN_TENSOR_ID = 906,
    DNN_PACK_IDS = 1000,
    DNN_PACK_POINTERS = 1001,
    DNN_PACK_WORKSPACE = 1003,
    DNN_ENGINE_INDEX = 1301,
    DNN_ENGINE_NUMERICAL_NOTES = 1303,
};

enum dnn_type {
    DNN_TYPE_HANDLE = 0,
    DNN_TYPE_DATA_TYPE = 1,
    DNN_TYPE_INT64 = 3,
    DNN_TYPE_FLOAT = 4,
    DNN_TYPE_DOUBLE = 5,
    DNN_TYPE_POINTER = 6,
    DNN_TYPE_CONVOLUTION_MODE = 7,
    DNN_TYPE_HEURISTIC_MODE = 8,
    DNN_TYPE_KNOB_TYPE = 9,
    DNN_TYPE_NUMERICAL_NOTE = 11,
    DNN_TYPE_DESCRIPTOR = 15,
};

enum dnn_data { DNN_DATA_F32 = 0, DNN_DATA_F64 = 1, DNN_DATA_F16 = 2, DNN_DATA_BF16 = 9 };
enum dnn_convolution_mode { DNN_CROSS_CORRELATION = 1 };
enum dnn_heuristic_mode { DNN_HEURISTIC_B = 1, DNN_HEURISTIC_FALLBACK = 2, DNN_HEURISTIC_A = 3 };

enum dnn_note {
    DNN_NOTE_TENSOR_CORE = 0,
    DNN_NOTE_DOWN_CONVERTS = 1,
    DNN_NOTE_REDUCED_PRECISION = 2,
    DNN_NOTE_NONDETERMINISTIC = 4,
    DNN_NOTE_COUNT = 10, /* more may come */
};

/* Functions return 0, or a number of which dnn.explain() makes a text. */
struct dnn_functions {
    size_t (*get_version)(void);
    const char *(*explain)(int status);
    int (*create)(void **handle);
    int (*set_stream)(void *handle, void *stream);
    int (*create_descriptor)(int kind, dnn_descriptor *descriptor);
    int (*destroy_descriptor)(dnn_descriptor descriptor);
    int (*finalize)(dnn_descriptor descriptor);
    int (*set)(dnn_descriptor descriptor, int attribute, int type, int64_t count,
               const void *values);
    int (*get)(dnn_descriptor descriptor, int attribute, int type, int64_t room, int64_t *count,
               void *values);
    int (*execute)(void *handle, dnn_descriptor plan, dnn_descriptor pack);
    size_t version; /* 91900 is 9.19.0 */
};

/** What is usable after td__dnn_handle_of() has returned a handle. */
extern struct dnn_functions td__dnn;

/** cuDNN's state for a GPU. Its functions are called under `lock`. */
struct dnn_handle {
    void *handle; /* NULL: without cuDNN */
    pthread_mutex_t lock;
};

struct cuda_device;

/** The handle of a GPU, whose context is that of the calling thread; NULL: without cuDNN, and the log says why. */
struct dnn_handle *td__dnn_handle_of(const struct cuda_device *device);

#endif
