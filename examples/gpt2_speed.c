/* How fast a device can multiply at most: what the speed of training is compared with. */
#include "gpt2.h"

#include <stdlib.h>
#include <strings.h>
#include <time.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* The seconds of one product of square matrices; -1 on failure. */
static double time_product(int64_t size, td_dtype dtype, td_device *device)
{
    TD_SCOPE;
    td_tensor *x = td_ones(TD_SHAPE(size, size), dtype, device);
    if (!x || td_device_synchronize(device))
        return -1;
    double start = now();
    return td_matmul(x, x) && !td_device_synchronize(device) ? now() - start : -1;
}

/* The best of some products, each of which takes at least a millisecond: shorter ones measure their start. */
double gpt2_measure_peak(td_device *device, bool bf16)
{
    double best = 0, end = now() + 0.2;
    int64_t size = 512;
    while (now() < end || best == 0) {
        double seconds = time_product(size, bf16 ? TD_BF16 : TD_F32, device);
        if (seconds < 0)
            return 0;
        double rate = 2.0 * (double)(size * size * size) / seconds;
        best = rate > best ? rate : best;
        if (seconds < 1e-3 && size < 16384)
            size *= 2;
    }
    return best;
}

double gpt2_known_peak(const char *text, bool bf16)
{
    static const struct {
        const char *name;
        double bf16, f32; /* TFLOP/s: dense, and without TF32 */
    } devices[] = {{"a100", 312, 19.5}, {"h100", 989, 67}, {"h200", 989, 67}, {"b200", 2250, 75}};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++)
        if (!strcasecmp(text, devices[i].name))
            return (bf16 ? devices[i].bf16 : devices[i].f32) * 1e12;
    char *end;
    double number = strtod(text, &end);
    return end != text && !*end && number > 0 ? number * 1e12 : 0;
}
