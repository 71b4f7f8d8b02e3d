// A stand-in for libgcc_s.so.1, to link against: the functions of it that Rust's standard library calls.
//
// zig brings LLVM's libunwind and links it statically. torch throws its exceptions with the libgcc_s of the
// process, and one unwinder cannot pass through the frames of the other: the process ends. So the extension
// has to ask for libgcc_s.so.1, as one that gcc links does. It is named here for every target, without versions,
// so that the loader takes the default ones; nothing of this file is in the wheel.
//
// A function that is missing here is not an error: it would come from libunwind again. A check of the finished
// wheel looks for that.

#define STAND_IN(name) \
    void name(void) {}

STAND_IN(_Unwind_Backtrace)
STAND_IN(_Unwind_DeleteException)
STAND_IN(_Unwind_FindEnclosingFunction)
STAND_IN(_Unwind_GetCFA)
STAND_IN(_Unwind_GetDataRelBase)
STAND_IN(_Unwind_GetIP)
STAND_IN(_Unwind_GetIPInfo)
STAND_IN(_Unwind_GetLanguageSpecificData)
STAND_IN(_Unwind_GetRegionStart)
STAND_IN(_Unwind_GetTextRelBase)
STAND_IN(_Unwind_RaiseException)
STAND_IN(_Unwind_Resume)
STAND_IN(_Unwind_SetGR)
STAND_IN(_Unwind_SetIP)
