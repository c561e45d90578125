/* Tandem: distributed training for C. This header includes all the others. */
#ifndef TANDEM_TANDEM_H
#define TANDEM_TANDEM_H

#include <tandem/base.h>
#include <tandem/dtype.h>
#include <tandem/launch.h>
#include <tandem/rendezvous.h>
#include <tandem/store.h>

#endif
