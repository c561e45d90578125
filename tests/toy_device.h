/* An accelerator for tests, without hardware: the kind "toy" with the devices toy:0 and toy:1, and the example of
 * docs/adding-a-device.md. It behaves as the worst accelerator that device_ops.h allows, so that an error of the
 * library becomes a wrong result or a crash, each time and not once a month:
 *
 *     memory      Each device has a small memory. The addresses of td_tensor_data() are mapped without any rights: the
 *                 host that touches them gets a SIGSEGV. Fresh and freed memory is poisoned. An address outside of the
 *                 live blocks, in a kernel or a copy, aborts the process with a sentence.
 *     streams     Each is a thread that waits a random time before each kernel, copy or event.
 *     copies      To and from pinned memory, they touch the host's memory only when the stream gets there. The host's
 *                 memory of a copy out is poisoned until then.
 *     kernels     Those of the host, later (toy_set_arithmetic() has others). Complex numbers, the slots adaptive_max_pool2d and arg_reduce, and
 *                 TD_UNARY_ERF are missing.
 *     failures    On request; see below.
 *
 * The files: toy_memory.c, toy_stream.c, toy_event.c, toy_copy.c, toy_kernels.c with toy_lists.c and toy_random.c,
 * toy_arithmetic.c, toy_control.c for what follows here, and toy_device.c, the table of functions.
 *
 * Threads. Everything may be called from any thread at any time, except toy_reset(). */
#ifndef TANDEM_TESTS_TOY_DEVICE_H
#define TANDEM_TESTS_TOY_DEVICE_H

#include <tandem/device_ops.h>

#define TOY_DEVICES 2
#define TOY_FRESH 0xff /* each byte of memory that was not written to yet: floats are NaN */
#define TOY_FREED 0xfd /* each byte of freed memory */

/** Registers the kind "toy"; a second call does nothing. */
td_status toy_register(void);

/** The table of functions, for tests that need no library around it. */
const td_device_ops *toy_ops(void);

/** Waits for all streams, ends their threads, frees all memory, and sets everything here to its default. Handles that
 *  the library still has are of no use afterwards: calls with them return TD_ERR_STATE or do nothing. Runs at exit. */
void toy_reset(void);

/* ---- Settings --------------------------------------------------------------------------------- */

/** The memory of each device that is opened from now on; 64 MiB by default. */
void toy_set_memory(size_t bytes);

/** The longest time before each kernel, copy or event of a stream; 100 by default, and 0 for speed. */
void toy_set_delay(int microseconds);

/** The seed of the times, for streams that are created from now on. */
void toy_set_seed(uint64_t seed);

/** With `missing` the kernel returns TD_ERR_UNSUPPORTED, until this is called again without. Aborts where there is no
 *  slot of this name, or where the toy has no kernel for it. */
void toy_set_missing(const char *slot, bool missing);

/** How kernels compute. All but the first two are wrong, each in a way that is easily made. */
enum toy_arithmetic {
    TOY_HOST,       /* as the host does, bit for bit; the default */
    TOY_WIDE,       /* f32 and halves in f64, rounded once: other bits, and as right */
    TOY_FEW_BITS,   /* the first result has half of its bits */
    TOY_LAST_ROW,   /* its last row is not written */
    TOY_ODD_SIZES,  /* its last element is not written if their number is odd */
    TOY_NO_STRIDES, /* operands are read as if they were contiguous */
};
void toy_set_arithmetic(enum toy_arithmetic arithmetic);

/** With `hold` the streams of a device start nothing, until this is called again without. */
void toy_hold(int device, bool hold);

/** The streams of a device start so many more copies and fills, and then wait before the next one, until this is called
 *  again. -1, the default: no limit. */
void toy_limit_copies(int device, int copies);

/* ---- Failures on request ----------------------------------------------------------------------
 *
 * `after` counts from now: 1 is the next one; 0 takes a request back. A failure that comes later is the device's: no
 * stream of it changes memory any more, and each call that can fail returns a sentence with the device and the kernel,
 * until toy_clear_failure(). An index out of range is such a failure too. */

enum toy_when {
    TOY_AT_LAUNCH, /* the call returns TD_ERR_SYSTEM, and nothing is enqueued */
    TOY_LATER,     /* the stream fails when it gets there */
};

void toy_fail_alloc(int device, int after); /* with TD_ERR_NOMEM */
void toy_fail_kernel(int device, int after, enum toy_when when);
void toy_fail_copy(int device, int after, enum toy_when when); /* copies of all kinds, and fills */

/** Waits until the streams of the device have run, without effect, what was enqueued before, and clears its failure. */
void toy_clear_failure(int device);

/* ---- Counters --------------------------------------------------------------------------------- */

struct toy_counts {
    int64_t kernels;         /* that have run */
    int64_t copied_in;       /* bytes from the host that were enqueued */
    int64_t copied_out;      /* bytes to the host */
    int64_t waits;           /* calls of stream_synchronize, event_synchronize and synchronize */
    int64_t allocated;       /* bytes of live blocks */
    int64_t allocated_peak;  /* the most of them since the device was opened */
    int64_t blocks;          /* live ones */
    int64_t streams, events; /* that were not destroyed */
};

struct toy_counts toy_counts(int device);

/** How often the kernel of a slot has run, on all devices. Aborts as toy_set_missing() does. */
int64_t toy_kernel_runs(const char *slot);

/** Host memory that is pinned, in bytes. */
int64_t toy_pinned_bytes(void);

#endif
