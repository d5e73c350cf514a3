#include <__msl_matmul.h>
