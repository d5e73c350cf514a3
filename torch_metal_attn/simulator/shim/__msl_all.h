// All headers for compute shaders. Every metal_ header includes them.
#pragma once
#include <__msl_apple.h>
#include <__msl_atomic.h>
#include <__msl_columns.h>
#include <__msl_engine.h>
#include <__msl_integer.h>
#include <__msl_launch.h>
#include <__msl_log.h>
#include <__msl_math.h>
#include <__msl_matrix.h>
#include <__msl_objects.h>
#include <__msl_packed.h>
#include <__msl_shift.h>
#include <__msl_simd.h>
#include <__msl_traits.h>
#include <__msl_types.h>
#include <__msl_uniform.h>
