// What GCC 12's headers take from a newer libstdc++ or glibc than wheels may ask for. Hidden, so that nobody else gets
// them; by the names that compilers make of them, since declarations of headers are not hidden.
#ifdef OFFLOAD_MANYLINUX_2_28

#include <condition_variable>
#include <mutex>
#include <new>

#define LOCAL __attribute__((visibility("hidden")))

extern "C" {

// exception_ptr(void*) and operator=(const exception_ptr&), which count.
void construct(void** self, void* exception) __asm__("_ZNSt15__exception_ptr13exception_ptrC1EPv");
void assign(void** self, void* const* other) __asm__("_ZNSt15__exception_ptr13exception_ptraSERKS0_");

// GCC 11: exception_ptr::_M_addref()
LOCAL void add_reference(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void** self) {
  void* never_destroyed = nullptr;
  construct(&never_destroyed, *self);
}

// GCC 11: exception_ptr::_M_release()
LOCAL void release(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void** self) {
  void* const none = nullptr;
  assign(self, &none);
}

// GCC 12: condition_variable::wait(), for its noexcept
LOCAL void wait(std::condition_variable* self, std::unique_lock<std::mutex>* lock) __asm__(
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void wait(std::condition_variable* self, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(self->native_handle(), lock->mutex()->native_handle());
}

// GCC 11
[[noreturn]] LOCAL void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// glibc 2.32: whether a shared_ptr may count without atomics. It may not: there is a worker pool.
LOCAL extern char single_threaded __asm__("__libc_single_threaded");
char single_threaded = 0;

}  // extern "C"

#endif
