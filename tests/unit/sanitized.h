// tests/unit/sanitized.h - which sanitizer watches a test. Under one a test takes several times as
// long, so that it repeats less: whatever it checks it still checks, in fewer combinations.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
enum { IS_ASAN = 1, IS_TSAN = 0 };
#elif defined(__SANITIZE_THREAD__)
enum { IS_ASAN = 0, IS_TSAN = 1 };
#else
enum { IS_ASAN = 0, IS_TSAN = 0 };
#endif
