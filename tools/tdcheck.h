/* tdcheck: compares the operators of a device with those of the host.
 *
 *     tdcheck.c             the command line, and the loop over the table
 *     tdcheck_table.c       the table: one row an operator
 *     tdcheck_calls.c       operators that take more than tensors and a number, as the table calls them
 *     tdcheck_inputs.c      shapes, layouts and values of operands
 *     tdcheck_run.c         one case: on the host, on the device, and the comparison of all results
 *     tdcheck_compare.c     tolerances
 *     tdcheck_memory.c      rows without a reference on the host: copies, streams
 *     tdcheck_random.c      random numbers and dropout
 *     tdcheck_optim.c       optimizers and clipping
 *     tdcheck_lists.c       norm, power_sums, scale and unscale
 *     tdcheck_slots.c       which kernels were called */
#ifndef TANDEM_TOOLS_TDCHECK_H
#define TANDEM_TOOLS_TDCHECK_H

#include <tandem/ops.h>

enum { CHECK_INPUTS = 6, CHECK_RESULTS = 4, CHECK_NUMBERS = 10, CHECK_TEXT = 1024 };

/* Sets of dtypes, for rows. */
#define BIT(dtype) (1u << (dtype))
#define FLOATS (BIT(TD_F32) | BIT(TD_F64) | BIT(TD_F16) | BIT(TD_BF16))
#define INTEGERS (BIT(TD_I64) | BIT(TD_I32) | BIT(TD_U8))
#define COMPLEX (BIT(TD_COMPLEX64) | BIT(TD_COMPLEX128))
#define NUMBERS (FLOATS | INTEGERS)
#define ALL_DTYPES (NUMBERS | BIT(TD_BOOL) | COMPLEX)

enum check_flags {
    /* How floating-point results are compared; without any: within a few units in the last place of each element, and
     * gradients relative to the greatest one. Other dtypes are always exact. */
    CHECK_EXACT = 1,    /* equal, though the sign of 0 may differ */
    CHECK_BITS = 2,     /* bit for bit, gradients too */
    CHECK_ABSOLUTE = 4, /* relative to the result for the absolute values of the operands */
    CHECK_LARGEST = 8,  /* relative to the greatest element */
    CHECK_CANCELS =
        16, /* gradients are sums of both signs: relative to what may have been added up, which is the greatest
                         * gradient of a result, times the results that an element enters */
    CHECK_IN_PLACE = 32, /* the first operand is the result */
    CHECK_NO_GRAD = 64,  /* not differentiable */
    CHECK_SPECIAL = 128, /* also for NaN, infinities, -0 and denormals */
    CHECK_PLAIN =
        256, /* operands are contiguous only: the layout does not matter, or is the row's own */
};

struct check_case; /* below */

/** Calls an operator; NULL on failure. More results than one go to case->more. */
typedef td_tensor *(*check_call)(td_tensor **x, struct check_case *c);

struct checker; /* tdcheck.c */

struct check_row {
    const char *name;
    unsigned dtypes;
    int flags;
    /** One letter an operand: n: -2 to 2; p: 0.5 to 2; u: 0 to 1; b: bool; c: i64, 0 to numbers[0] - 1; i: small
     *  integers, in the dtype of the row, many of them equal. */
    const char *values;
    /** Shapes of the operands, cases separated by ';', with numbers for the call after ':': "2x3 3x4 : 1; 5 5". A
     *  single '.' is no dimension; '-' is NULL. */
    const char *shapes;
    /* One of these. */
    td_tensor *(*tensor1)(td_tensor *);
    td_tensor *(*tensor2)(td_tensor *, td_tensor *);
    td_tensor *(*scalar)(td_tensor *, double);
    td_status (*in_place1)(td_tensor *);
    td_status (*in_place2)(td_tensor *, td_tensor *);
    td_status (*in_place_scalar)(td_tensor *, double);
    check_call call;
    /** A row of its own kind: calls checker_passed(), checker_failed() … itself. */
    void (*own)(struct checker *checker, const struct check_row *row, td_dtype dtype);
    double number;    /* for `scalar` */
    double tolerance; /* in units of the last place; 0: the default */
};

extern const struct check_row check_rows[];

enum check_layout {
    CHECK_CONTIGUOUS,
    CHECK_TRANSPOSED, /* the memory has the dimensions in reverse */
    CHECK_STEPPED,    /* every second element, from the second one on, of something larger */
    CHECK_EXPANDED,   /* dimension 0 has stride 0 */
    CHECK_LAYOUTS,
};

/* One case: a row with a dtype, shapes and a layout. */
struct check_case {
    const struct check_row *row;
    td_dtype dtype;
    int number_of; /* of the shapes, in the row */
    int layout;    /* of operand 0; operand i has the next one but i */
    bool special, with_grad;
    bool magnitudes; /* it is computed over absolute values: factors among the numbers, too */
    int count;       /* operands */
    int ndim[CHECK_INPUTS];
    bool is_null[CHECK_INPUTS];
    int64_t shape[CHECK_INPUTS][TD_MAX_DIMS];
    double numbers[CHECK_NUMBERS];
    int number_count;
    td_tensor *more[CHECK_RESULTS - 1]; /* further results of the last call */
};

/* ---- Operands (tdcheck_inputs.c) ------------------------------------------------------------------- */

/** Reads the next case of row->shapes from *text on, and moves it; false at the end. */
bool check_next_shapes(struct check_case *c, const char **text);

/** Numbers that depend on nothing but the seed. */
struct check_random {
    uint64_t state;
};
struct check_random check_random_of(uint64_t seed, const struct check_case *c);
double check_uniform(struct check_random *random);

/** The memory of an operand on the host: contiguous, as large as the layout needs. */
td_tensor *check_base(struct check_random *random, const struct check_case *c, int operand);
/** The operand itself, as a view of its base. */
td_tensor *check_view(td_tensor *base, const struct check_case *c, int operand);
/** Random numbers of a shape, on the host. */
td_tensor *check_numbers(struct check_random *random, const int64_t *shape, int ndim,
                         td_dtype dtype, char kind, int64_t range);

enum check_layout check_layout_of(const struct check_case *c, int operand);
/** "[3, 4] strides [1, 3] f32" for each operand. */
void check_describe(const struct check_case *c, td_tensor *const *x, char text[CHECK_TEXT]);

/* ---- Comparison (tdcheck_compare.c) ---------------------------------------------------------------- */

struct check_difference {
    double worst; /* of the tolerance: above 1 is a failure */
    int64_t at;   /* the first wrong element; -1: none */
    char text[256];
};

enum check_measure {
    MEASURE_BITS,
    MEASURE_EQUAL,
    MEASURE_ELEMENT,
    MEASURE_LARGEST,
    MEASURE_ABSOLUTE
};

/** Compares tensors of the host. `magnitude` (f64, NULL unless MEASURE_ABSOLUTE) has the shape of both. */
struct check_difference check_compare(td_tensor *expected, td_tensor *found, td_tensor *magnitude,
                                      enum check_measure measure, double units);

/* ---- Slots (tdcheck_slots.c) ----------------------------------------------------------------------- */

void check_slots_watch(void);
/** Prints which slots were called. Returns how many of those that the device has were not. */
int check_slots_print(td_device *device, bool all_rows);

/* ---- The checker (tdcheck.c) ----------------------------------------------------------------------- */

struct checker {
    td_device *device;
    td_device *other; /* another one of its kind, or NULL */
    uint64_t seed;
    bool verbose;
    bool may_wait; /* TANDEM_FALLBACK=cpu copies, and waits */
    /* Of the row. */
    const struct check_row *row;
    int passed, failed, missing;
    double worst;
    td_dtype worst_dtype;
    char missing_text[256];
};

/** Counts a case. The first failures of a row are printed: `what` is the sentence, `c` may be NULL. */
void checker_passed(struct checker *checker, td_dtype dtype, double worst);
void checker_failed(struct checker *checker, td_dtype dtype, const char *inputs, const char *format,
                    ...) __attribute__((format(printf, 4, 5)));
/** After a call on the device has failed: missing if it is TD_ERR_UNSUPPORTED, else a failure. */
void checker_refused(struct checker *checker, td_dtype dtype, const char *inputs, const char *call);

/** Runs one case in all its ways. */
void check_run(struct checker *checker, struct check_case *c);

/** A tensor of the device on the host, without the graph; NULL on failure. */
td_tensor *check_fetch(td_tensor *tensor);

#endif
