/* Modules: the building blocks of a network, each with its parameters.
 *
 *     td_module *net = td_sequential(td_conv2d(1, 10, 5), td_max_pool2d(2), td_relu(),
 *                                    td_flatten(), td_linear(1440, 10), NULL);
 *     td_tensor *y = td_forward(net, x);
 *     td_module_destroy(net);
 *
 * A module has parameters (tensors that require grad), buffers (tensors that do not, such as
 * running statistics), and children, each with a name. A tensor's full name is its path:
 * "0.weight", "layers.1.self_attn.in_proj_weight". Names, shapes and order are PyTorch's, and so
 * are the initial values: with the same seed and the same order of construction they are those of
 * PyTorch 1.13 bit for bit. They are f32, on "cpu".
 *
 * Ownership. A module belongs to the caller, and is freed with td_module_destroy(); a child belongs
 * to its parent. Modules retain their tensors.
 *
 * Errors. A function that makes a module returns NULL on failure, and td_last_error() says why. A
 * function that takes modules owns them in any case: if one of them is NULL, it destroys the others
 * and returns NULL, so that one check at the end of an expression is enough.
 *
 * Threads. A module runs in one thread at a time; clones are independent. */
#ifndef TANDEM_NN_H
#define TANDEM_NN_H

#include <tandem/ops.h>
#include <tandem/state.h>

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_module td_module;

/* ---- Running ------------------------------------------------------------------------------------ */

/** The result for `x`. It belongs to the innermost TD_SCOPE or to the caller, as every result
 *  does; intermediate tensors are released. NULL for a NULL module or a NULL input. */
TD_API td_tensor *td_forward(td_module *module, td_tensor *x);

/** The same for a module of several inputs, td_forward_with(net, TD_TENSORS(x, mask)); NULL if one
 *  of them is. */
TD_API td_tensor *td_forward_with(td_module *module, td_tensor *const *inputs, int count);

enum { TD_TENSOR_LIST_MAX = 32 };

/**
 * Inputs or results of a module: tensors in order, optionally with names.
 *
 *     td_tensor_list inputs = {.count = 2, .at = {x, mask}, .names = {NULL, "mask"}}, results;
 *     if (td_forward_list(net, &inputs, &results) == TD_OK)
 *         … results.at[0], td_tensor_list_get(&results, "weights") …
 *
 * It owns nothing; the names must stay as long as the list is used. All zero is an empty list.
 */
typedef struct td_tensor_list {
    int count;
    td_tensor *at[TD_TENSOR_LIST_MAX];
    const char *names[TD_TENSOR_LIST_MAX]; /* NULL: without one */
    void *reserved[4];
} td_tensor_list;

/** The tensor of a name; NULL if there is none, which is no error. */
TD_API td_tensor *td_tensor_list_get(const td_tensor_list *list, const char *name);

/** Appends a tensor. TD_ERR_INVALID for NULL, a duplicate name, and a full list. */
TD_API td_status td_tensor_list_add(td_tensor_list *list, const char *name, td_tensor *tensor);

/** Several inputs, by order or by name as the module takes them, and all results. They belong to
 *  the innermost TD_SCOPE or to the caller. On failure `results` is empty. It may be `inputs`. */
TD_API td_status td_forward_list(td_module *module, const td_tensor_list *inputs,
                                 td_tensor_list *results);

/** Frees a module and its children. NULL is fine. A child is not freed, which is logged: its
 *  parent destroys it. */
TD_API void td_module_destroy(td_module *module);

/* ---- Composition -------------------------------------------------------------------------------- */

/** Runs its children in order: each gets all results of the one before. The children are named
 *  "0", "1", …; the list ends with NULL, and a NULL before that is a module that could not be
 *  made. */
#define td_sequential(...) td_sequential_ended(TD_MODULE_LIST(__VA_ARGS__))

/** The same of a list that need not end with NULL. */
TD_API td_module *td_sequential_of(td_module *const *modules, int count);

/** A list of modules without a forward of its own, for custom modules. */
#define td_module_list(...) td_module_list_ended(TD_MODULE_LIST(__VA_ARGS__))
TD_API td_module *td_module_list_of(td_module *const *modules, int count);

/** What the macros call: the last of `count` is the NULL. C++ has its own form at the end of this header. */
#ifdef __cplusplus
#define TD_MODULE_LIST(...)                                                                        \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
#else
#define TD_MODULE_LIST(...) TD_LIST(td_module *, __VA_ARGS__)
#endif
TD_API td_module *td_sequential_ended(td_module *const *modules, int count);
TD_API td_module *td_module_list_ended(td_module *const *modules, int count);

/* ---- Layers ------------------------------------------------------------------------------------- */

typedef struct td_linear_options {
    bool no_bias;
    void *reserved[4];
} td_linear_options;

/** weight [out, in], bias [out]. */
TD_API td_module *td_linear(int64_t in_features, int64_t out_features);
TD_API td_module *td_linear_with(int64_t in_features, int64_t out_features,
                                 const td_linear_options *options);

/** weight [out, in / groups, height, width], bias [out]; square kernels without _with. The options
 *  are those of td_f_conv2d(). */
TD_API td_module *td_conv2d(int64_t in_channels, int64_t out_channels, int64_t kernel_size);
TD_API td_module *td_conv2d_with(int64_t in_channels, int64_t out_channels, int64_t kernel_height,
                                 int64_t kernel_width, const td_conv2d_options *options);

/** Pooling as td_f_max_pool2d() and td_f_avg_pool2d() do it; square kernels without _with. */
TD_API td_module *td_max_pool2d(int64_t kernel_size);
TD_API td_module *td_max_pool2d_with(int64_t kernel_height, int64_t kernel_width,
                                     const td_pool2d_options *options);
TD_API td_module *td_avg_pool2d(int64_t kernel_size);
TD_API td_module *td_avg_pool2d_with(int64_t kernel_height, int64_t kernel_width,
                                     const td_pool2d_options *options);
/** To this size, whatever the input's. */
TD_API td_module *td_adaptive_avg_pool2d(int64_t height, int64_t width);
TD_API td_module *td_adaptive_max_pool2d(int64_t height, int64_t width);

typedef struct td_batch_norm_options {
    double eps;            /* 0: 1e-5 */
    double momentum;       /* 0: 0.1 */
    bool cumulative;       /* instead of the momentum: cumulative averages of all batches */
    bool no_affine;        /* without weight and bias */
    bool no_running_stats; /* batch statistics in eval mode, too */
    void *reserved[4];
} td_batch_norm_options;

/** x [N, C] or [N, C, L]; and x [N, C, H, W]. weight, bias [C]; the buffers running_mean and
 *  running_var [C] and num_batches_tracked (i64). */
TD_API td_module *td_batch_norm1d(int64_t features);
TD_API td_module *td_batch_norm1d_with(int64_t features, const td_batch_norm_options *options);
TD_API td_module *td_batch_norm2d(int64_t features);
TD_API td_module *td_batch_norm2d_with(int64_t features, const td_batch_norm_options *options);
/**
 * td_batch_norm_relu() with the weights and statistics of `norm`: relu(norm(x) + residual), residual NULL: relu(norm(x)), which
 * td_sequential() calls for a batch norm with a ReLU behind it. `norm` may be any module; the others, and those with hooks,
 * run as by td_forward().
 *
 *      return td_forward_add_relu(td_child(self, NORM_2), td_forward(td_child(self, CONV_2), y), inputs[0]);
 */
TD_API td_tensor *td_forward_add_relu(td_module *norm, td_tensor *x, td_tensor *residual);

typedef struct td_layer_norm_options {
    double eps; /* 0: 1e-5 */
    bool no_affine;
    void *reserved[4];
} td_layer_norm_options;

/** Over the last dimension; over the last `ndim` dimensions, which have these sizes. */
TD_API td_module *td_layer_norm(int64_t features);
TD_API td_module *td_layer_norm_with(const int64_t *shape, int ndim,
                                     const td_layer_norm_options *options);
/** td_add_layer_norm() with the weights of `norm`, a module of td_layer_norm(): the norm of x + residual (or of x, where
 *  residual is NULL), and in *sum, unless `sum` is NULL, what was normalised: what is added to the stream next is added to it.
 *
 *      td_tensor *n = td_forward_add(td_child(self, LN_2), x, attention, &x);      x is the residual stream
 */
TD_API td_tensor *td_forward_add(td_module *norm, td_tensor *x, td_tensor *residual,
                                 td_tensor **sum);

/** Activations, each as the operator td_f_x() of its name. */
TD_API td_module *td_relu(void);
TD_API td_module *td_gelu(void);
TD_API td_module *td_gelu_tanh(void); /* the approximation by tanh */
TD_API td_module *td_silu(void);
TD_API td_module *td_tanh(void);
TD_API td_module *td_sigmoid(void);
TD_API td_module *td_softmax(int dim);
TD_API td_module *td_log_softmax(int dim);

/** In train mode, zeroes each element (dropout2d: each channel of [N, C, H, W]) with probability
 * p. */
TD_API td_module *td_dropout(double p);
TD_API td_module *td_dropout2d(double p);

typedef struct td_embedding_options {
    bool padding;        /* row padding_idx is 0, and gets no gradient */
    int64_t padding_idx; /* a negative one counts from the end */
    void *reserved[4];
} td_embedding_options;

/** Rows of weight [count, width] for i64 indices of any shape. */
TD_API td_module *td_embedding(int64_t count, int64_t width);
TD_API td_module *td_embedding_with(int64_t count, int64_t width,
                                    const td_embedding_options *options);

/** Merges dimensions 1 to the last; `first` to `last`. */
TD_API td_module *td_flatten(void);
TD_API td_module *td_flatten_with(int first, int last);

/** Returns its input. */
TD_API td_module *td_identity(void);

/* ---- Attention ---------------------------------------------------------------------------------- */

typedef struct td_multihead_attention_options {
    double dropout; /* of the weights, in train mode */
    bool no_bias;
    bool causal;      /* position i attends to positions 0 to i */
    bool batch_first; /* tensors are [N, L, E] instead of [L, N, E] */
    void *reserved[4];
} td_multihead_attention_options;

/**
 * Multi-head attention. Parameters: in_proj_weight [3 E, E] (query, key and value stacked),
 * in_proj_bias [3 E], out_proj.weight [E, E], out_proj.bias [E].
 *
 * Inputs: x [L, N, E] (or [L, E]) for self-attention; x and a mask; query [L, N, E], key and value
 * [S, N, E]; or these three and a mask. td_forward_list() also takes the mask by the name "mask",
 * at any position. A mask broadcasts to [N, heads, L, S], and is as in td_attention_options: bool
 * (true: attend, as in scaled_dot_product_attention), or added to the scores.
 */
TD_API td_module *td_multihead_attention(int64_t width, int64_t heads);
TD_API td_module *td_multihead_attention_with(int64_t width, int64_t heads,
                                              const td_multihead_attention_options *options);

typedef struct td_transformer_options {
    int64_t feedforward; /* width inside the feed-forward part; 0: 2048 */
    double dropout;      /* 0: 0.1; TD_ZERO: none */
    bool gelu;           /* instead of relu */
    bool norm_first;     /* normalise before the parts instead of after their residual sums */
    double eps;          /* of the norms; 0: 1e-5 */
    bool causal;
    bool batch_first; /* as for td_multihead_attention() */
    void *reserved[4];
} td_transformer_options;

/** nn.TransformerEncoderLayer: self-attention and a feed-forward part, each with dropout, a
 *  residual sum and a norm. Inputs: x [L, N, width], and optionally a mask. Children: self_attn,
 *  linear1, dropout, linear2, norm1, norm2, dropout1, dropout2. */
TD_API td_module *td_transformer_encoder_layer(int64_t width, int64_t heads);
TD_API td_module *td_transformer_encoder_layer_with(int64_t width, int64_t heads,
                                                    const td_transformer_options *options);

/** nn.TransformerEncoder: `count` clones of `layer` (which it takes over) in sequence, with the
 *  same initial values, and `norm` at the end unless it is NULL. Children: layers, norm. */
TD_API td_module *td_transformer_encoder(td_module *layer, int count, td_module *norm);

/* ---- Parameters and buffers --------------------------------------------------------------------- */

/** The parameters with their names: a module's own, then those of its children; a shared one once,
 *  with its first name. They are the tensors themselves. For td_state_destroy(). NULL for NULL, and
 *  without memory. */
TD_API td_state *td_module_parameters(td_module *module);

/** The buffers, those that are not saved included. */
TD_API td_state *td_module_buffers(td_module *module);

/** The parameter, or the buffer, of a name such as "0.weight", and the module of a name such as
 *  "layers.1". They belong to the module. NULL if there is none, and the last error names it. */
TD_API td_tensor *td_module_parameter(td_module *module, const char *name);
TD_API td_tensor *td_module_buffer(td_module *module, const char *name);
TD_API td_module *td_module_find(td_module *module, const char *name);

/** Replaces a parameter or a buffer by another tensor, and retains it. It may be a parameter
 *  elsewhere: then both share it. Whether it requires grad does not change. */
TD_API td_status td_module_set_tensor(td_module *module, const char *name, td_tensor *tensor);

/** The number of elements of all parameters. */
TD_API int64_t td_module_parameter_count(td_module *module);

/** td_tensor_zero_grad() for all parameters. */
TD_API td_status td_module_zero_grad(td_module *module);

/** Sets whether the parameters require grad; they do at first. */
TD_API td_status td_module_requires_grad_(td_module *module, bool requires_grad);

/** Moves all parameters and buffers to a device, or converts floating-point ones to a dtype. The
 *  tensors are replaced, and an optimizer made before keeps the former ones: make it afterwards.
 *  Gradients are moved, hooks are not. On failure nothing was changed. */
TD_API td_status td_module_to(td_module *module, td_device *device);
TD_API td_status td_module_to_dtype(td_module *module, td_dtype dtype);

/**
 * Deferred initialisation: a module that is made on a meta device (td_device_meta()) costs no memory and computes no
 * initial values, but notes what they will be.
 *
 *     td_manual_seed(17);
 *     {
 *         TD_DEVICE_SCOPE(td_device_get("meta"));        or td_device_meta(gpu)
 *         net = td_sequential(td_linear(…), …, NULL);
 *     }
 *     td_load_module("weights", net, NULL);              what is loaded is not initialised first
 *     td_module_materialize(net);                        the rest; or td_fsdp(net, …): each rank its shards
 *
 * td_module_materialize() gives each parameter and buffer of the module that is on a meta device memory on the device that
 * this is of, and the bits that the module would have had if it had been made there; the state of the generators is the same, too.
 * The tensors stay the same. On failure, which names the tensor, the call can be made again.
 *
 * Until then td_module_to() with another meta device notes the move, and with any other device computes the values there;
 * td_module_to_dtype() and td_module_clone() work, too. Passes, optimizers, td_ddp() and saving need memory.
 */
TD_API td_status td_module_materialize(td_module *module);

/* ---- Hooks: functions that run before and after the passes of a module --------------------------- */

/**
 * PyTorch's register_forward_pre_hook(), register_forward_hook(), register_full_backward_pre_hook() and
 * register_full_backward_hook(); each may be NULL, and a failure ends the pass.
 *
 * `forward_pre` may replace inputs, and `forward` results, or change their number. `backward_pre` runs when the
 * gradients of all results are there, before anything of the module is differentiated; `backward` when the gradients of
 * all inputs are, which for the parameters of the module is not said; if no input requires grad, right after
 * `backward_pre`, with an empty list. A tensor without a gradient is NULL in these lists. Both may replace gradients by
 * others of the same shape, dtype and device. Tensors that a hook makes belong to a scope around it; in backward passes
 * grad mode is off. Hooks of a pass run on the threads of that pass.
 */
typedef struct td_module_hooks {
    td_status (*forward_pre)(td_module *module, td_tensor_list *inputs, void *arg);
    td_status (*forward)(td_module *module, const td_tensor_list *inputs, td_tensor_list *results,
                         void *arg);
    td_status (*backward_pre)(td_module *module, td_tensor_list *grad_results, void *arg);
    td_status (*backward)(td_module *module, td_tensor_list *grad_inputs,
                          const td_tensor_list *grad_results, void *arg);
    void *arg;
    void *reserved[4];
} td_module_hooks;

/** Adds hooks, which run in the order in which they were added, for each call of the module by td_forward() and the
 *  like. Gradients are seen for calls that begin after it. *id, where not NULL, is for removing them. Neither clones nor
 *  modules that are sent elsewhere have hooks. A module with backward hooks must not change its inputs in place. */
TD_API td_status td_module_add_hooks(td_module *module, const td_module_hooks *hooks, uint64_t *id);

/** TD_ERR_INVALID if there are none with this number. Not while a pass of the module runs. */
TD_API td_status td_module_remove_hooks(td_module *module, uint64_t id);

/* ---- Modes, states, clones ---------------------------------------------------------------------- */

/** Train mode (the default) or eval mode, for the module and its children. */
TD_API void td_module_train(td_module *module, bool training);
TD_API void td_module_eval(td_module *module);
TD_API bool td_module_is_training(const td_module *module);

/** The state_dict: parameters and saved buffers, in PyTorch's order. The tensors share the
 *  module's memory and are marked as shards like them, and do not require grad; td_state_clone() copies them. */
TD_API td_state *td_module_state(td_module *module);

/**
 * Copies the tensors of a state into those of the module, which must have the same shapes; dtypes
 * are converted. With `strict`, both must have the same names. On a mismatch TD_ERR_INVALID, and
 * nothing was changed: the error names missing and unexpected entries, and those of another shape. A parameter that is a
 * shard takes its part of a whole tensor, or the same shard; one on a meta device gets its memory.
 */
TD_API td_status td_module_load_state(td_module *module, const td_state *state, bool strict);

/** Calls fn(module, arg) for each module, children first, the module itself last. Stops at the
 *  first failure. */
typedef td_status (*td_module_fn)(td_module *module, void *arg);
TD_API td_status td_module_apply(td_module *module, td_module_fn fn, void *arg);

/** A module of the same kind with copies of all parameters and buffers, which require grad if
 *  these do. Shared tensors are shared in the clone. */
TD_API td_module *td_module_clone(const td_module *module);

/** The same with map(tensor, arg) for each parameter and buffer, called once for each tensor; its
 *  result is retained. NULL is a failure. For replicas whose tensors are results of the
 *  module's. */
typedef td_tensor *(*td_tensor_map)(td_tensor *tensor, void *arg);
TD_API td_module *td_module_clone_with(const td_module *module, td_tensor_map map, void *arg);

/** The module and its children as PyTorch prints them; the text is empty without memory. */
TD_API td_status td_module_print(const td_module *module, FILE *file);
TD_API td_bytes td_module_text(const td_module *module);

/* ---- Custom modules -----------------------------------------------------------------------------
 *
 *     enum { CONV, FC };                                  children, in the order in which they are added
 *
 *     static td_tensor *net_forward(td_module *net, td_tensor *const *inputs, int count)
 *     {
 *         td_tensor *x = td_f_relu(td_forward(td_child(net, CONV), inputs[0]));
 *         return td_forward(td_child(net, FC), td_f_flatten(x, 1, -1));
 *     }
 *     static const td_module_ops net_ops = {.name = "Net", .forward = net_forward};
 *
 *     td_module *net = td_module_create(&net_ops);
 *     td_module_add_child(net, "conv", td_conv2d(1, 10, 5));
 *     td_module_add_child(net, "fc", td_linear(5760, 10));
 *     net = td_module_finish(net);                        NULL where one of these failed
 *
 * docs/adding-an-op.md walks through one. */

/** The ops table of a kind of module; it must outlive its modules. */
typedef struct td_module_ops {
    const char *name; /* as it is printed: "Linear" */
    /** Bytes of data of each module, zeroed; see td_module_data(). Clones get a copy of the bytes;
     *  if the data own something, clone_data and free_data copy and free that. */
    size_t data_size;
    /** The result for `count` inputs, at least one, none of them NULL. It runs in a scope of its
     *  own, which releases all tensors but the result. Get tensors by td_param() and td_buffer() in
     *  each call, and do not keep them: a clone runs the same code with other tensors. On failure
     *  NULL, with the last error set. */
    td_tensor *(*forward)(td_module *module, td_tensor *const *inputs, int count);
    /** Instead of forward, for a module of several results, or one that takes inputs by name: adds the
     *  results to the list, which is empty. The rest is as for forward. */
    td_status (*forward_list)(td_module *module, const td_tensor_list *inputs,
                              td_tensor_list *results);
    /** Frees what the data own, not the data themselves, which may still be zeroed. NULL: nothing. */
    void (*free_data)(void *data);
    /** Called for a clone whose data are a copy of the bytes of `from`: copies what the data own.
     *  NULL: nothing to do. If it fails, free_data is not called. */
    td_status (*clone_data)(void *data, const void *from);
    /** Writes PyTorch's extra_repr(), such as "in_features=3", and returns as snprintf() does.
     *  NULL: nothing. */
    int (*describe)(const td_module *module, char *text, size_t size);
    /** Adds what the data hold as named numbers: td_state_add_integer(options, "stride", 2). On failure the
     *  module cannot be sent. NULL, if data_size is 0: there is nothing to add. */
    td_status (*save_options)(const td_module *module, td_state *options);
    /** Sets the zeroed data of a received module from such numbers; its parameters, buffers and children are
     *  there already. Numbers and parts come from another process: TD_ERR_INVALID for those that no module
     *  of this kind has. On failure free_data is called. NULL, if data_size is 0: no numbers are valid. */
    td_status (*load_options)(td_module *module, const td_state *options);
    /** Called by td_module_train() and td_module_eval() when the mode was set. NULL: nothing. */
    void (*train)(td_module *module);
    /** Of a module whose tensors are in another process: fails, with a sentence about that. Called by what needs them
     *  all (parameters, states, clones, moves). NULL: its tensors are its own. */
    td_status (*refuse_tensors)(const td_module *module);
    void *reserved[2];
} td_module_ops;

/**
 * Registers a kind, so that its modules can be sent to other processes, and received (rpc.h): they are sent by
 * the name of their kind, their options, parameters, buffers and children, and the receiver makes them anew.
 * Both processes register the kind; the kinds of this header are known to all. The table must stay for the
 * life of the process. May be called by any thread, and again with the same table.
 *
 * Errors: TD_ERR_INVALID (a table without a name, or that has data without both save_options and
 * load_options), TD_ERR_STATE (there is another kind of this name).
 */
TD_API td_status td_register_module(const td_module_ops *ops);

/** A module without parameters, buffers and children; they are added next. NULL without memory. */
TD_API td_module *td_module_create(const td_module_ops *ops);

/** Its data, data_size bytes, aligned as malloc() does. */
TD_API void *td_module_data(const td_module *module);
TD_API const td_module_ops *td_module_ops_of(const td_module *module);

/* Each of these fails for a NULL module, a NULL child or tensor, and a name that is taken, empty,
 * or has a dot. The module keeps its first failure: td_module_finish() reports it, so that only its
 * result need be checked. */

/** Adds a tensor as a parameter, retains it, and makes it require grad. */
TD_API td_status td_module_add_parameter(td_module *module, const char *name, td_tensor *tensor);

/** Adds an uninitialised parameter, and returns it; it belongs to the module. */
TD_API td_tensor *td_module_new_parameter(td_module *module, const char *name, const int64_t *shape,
                                          int ndim, td_dtype dtype);

/** Adds a tensor as a buffer, and retains it; if not `saved`, it is not part of the state. */
TD_API td_status td_module_add_buffer(td_module *module, const char *name, td_tensor *tensor,
                                      bool saved);

/** Adds a child, which then belongs to the module. On failure it is destroyed. */
TD_API td_status td_module_add_child(td_module *module, const char *name, td_module *child);

/** Returns the module; if adding a part has failed, destroys it and returns NULL. */
TD_API td_module *td_module_finish(td_module *module);

/** A module's own parameters, buffers and children, numbered in the order in which they were
 *  added; NULL if `index` is out of range. They belong to the module. */
TD_API td_tensor *td_param(const td_module *module, int index);
TD_API td_tensor *td_buffer(const td_module *module, int index);
TD_API td_module *td_child(const td_module *module, int index);
TD_API int td_child_count(const td_module *module);
/** The name of a child in the module. */
TD_API const char *td_child_name(const td_module *module, int index);

/** Replaces a child, which is destroyed; on failure `child` is. */
TD_API td_status td_module_replace_child(td_module *module, int index, td_module *child);

/* ---- Initial values (torch.nn.init) --------------------------------------------------------------
 *
 * Each fills a tensor from the default generator of its device, with grad mode off: on the host with PyTorch's numbers. On
 * a meta device they are recorded.
 * TD_ERR_INVALID for a shape or dtype that does not fit. */

/** Uniform in [from, to); and normal. */
TD_API td_status td_init_uniform(td_tensor *tensor, double from, double to);
TD_API td_status td_init_normal(td_tensor *tensor, double mean, double std);
/** Normal numbers within low to high. They are PyTorch's bit for bit with AVX2 and the same C
 *  library, whose erf(), exp() and log() PyTorch uses, too; otherwise the last bits may differ. They are computed on the
 *  host, which waits for an accelerator. */
TD_API td_status td_init_trunc_normal(td_tensor *tensor, double mean, double std, double low,
                                      double high);
/** A constant. */
TD_API td_status td_init_constant(td_tensor *tensor, double value);

typedef enum td_nonlinearity {
    TD_LEAKY_RELU, /* gain sqrt(2 / (1 + a^2)), where a is the negative slope */
    TD_RELU,       /* sqrt(2) */
    TD_LINEAR,     /* 1; convolutions and sigmoid too */
    TD_TANH,       /* 5 / 3 */
    TD_SELU,       /* 3 / 4 */
} td_nonlinearity;

/** torch.nn.init.calculate_gain(); `a` is used for TD_LEAKY_RELU only. */
TD_API double td_init_gain(td_nonlinearity nonlinearity, double a);

/** For tensors of at least two dimensions. The usual `gain` is 1. */
TD_API td_status td_init_xavier_uniform(td_tensor *tensor, double gain);
TD_API td_status td_init_xavier_normal(td_tensor *tensor, double gain);

typedef struct td_kaiming_options {
    double a;     /* the negative slope of the TD_LEAKY_RELU after this layer */
    bool fan_out; /* use fan_out: preserves the magnitude of gradients instead of activations */
    td_nonlinearity nonlinearity;
    void *reserved[4];
} td_kaiming_options;

/** He initialisation, uniform or normal. `options` may be NULL. */
TD_API td_status td_init_kaiming_uniform(td_tensor *tensor, const td_kaiming_options *options);
TD_API td_status td_init_kaiming_normal(td_tensor *tensor, const td_kaiming_options *options);

#ifdef __cplusplus
}

#include <initializer_list>

inline td_module *td_sequential_ended(std::initializer_list<td_module *> modules)
{
    return td_sequential_ended(modules.begin(), (int)modules.size());
}

inline td_module *td_module_list_ended(std::initializer_list<td_module *> modules)
{
    return td_module_list_ended(modules.begin(), (int)modules.size());
}
#endif

#endif
