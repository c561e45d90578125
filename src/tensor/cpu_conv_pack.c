/* im2col and col2im, for f32 and f64; see conv.h. */
#include "tensor/conv.h"
#include "tensor/vector.h"

#include <string.h>

#define WIDEST 64 /* rows that a product packs, at most */

#define REAL float
#define NAMED(name) name##_f32
#include "tensor/conv_loops.h"

#define REAL double
#define NAMED(name) name##_f64
#include "tensor/conv_loops.h"
