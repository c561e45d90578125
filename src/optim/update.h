/* The loops that update parameters, one pass over the memory of each. They round as PyTorch's
 * sequence of operations does, so that results agree bit for bit. */
#ifndef TD_OPTIM_UPDATE_H
#define TD_OPTIM_UPDATE_H

#include <stdbool.h>
#include <stdint.h>

struct td__sgd_step {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, maximize;
    bool first; /* the momentum begins with this gradient */
};

/** `buffer` is NULL where there is no momentum. */
void td__sgd_f32(float *parameter, const float *grad, float *buffer, int64_t count,
                 const struct td__sgd_step *step);
void td__sgd_f64(double *parameter, const double *grad, double *buffer, int64_t count,
                 const struct td__sgd_step *step);

struct td__adam_step {
    double beta1, beta2, eps;
    double weight_decay;    /* added to the gradient; 0: none */
    double shrink;          /* the parameter is multiplied by this first; 1: not at all */
    double size;            /* the learning rate over the first bias correction */
    double root_correction; /* the root of the second bias correction */
    bool maximize;
};

/** `greatest` is NULL without amsgrad. */
void td__adam_f32(float *parameter, const float *grad, float *mean, float *square, float *greatest,
                  int64_t count, const struct td__adam_step *step);
void td__adam_f64(double *parameter, const double *grad, double *mean, double *square,
                  double *greatest, int64_t count, const struct td__adam_step *step);

/** The sum of squares, the greatest absolute value (NaN where there is one), and the sum of the powers
 *  of absolute values. */
double td__sum_squares_f32(const float *x, int64_t count);
double td__sum_squares_f64(const double *x, int64_t count);
double td__greatest_f32(const float *x, int64_t count);
double td__greatest_f64(const double *x, int64_t count);
double td__sum_powers_f32(const float *x, int64_t count, double power);
double td__sum_powers_f64(const double *x, int64_t count, double power);

#endif
