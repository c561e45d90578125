/* The inverse of erf(), bit for bit that of PyTorch 1.13 on a processor with AVX2 and with the same C
 * library: both call its erf, exp and log, whose last bits differ between versions. */
#ifndef TD_TENSOR_ERFINV_H
#define TD_TENSOR_ERFINV_H

/** Infinite at -1 and 1, NaN outside. */
float td__erfinv_f32(float y);
double td__erfinv_f64(double y);

#endif
