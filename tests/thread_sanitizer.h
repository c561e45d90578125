/* Whether ThreadSanitizer is on: then tests do less work that only one thread does. */
#ifndef TANDEM_TESTS_THREAD_SANITIZER_H
#define TANDEM_TESTS_THREAD_SANITIZER_H

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif

#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

#endif
