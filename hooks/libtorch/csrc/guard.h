// Keeps C++ exceptions on this side of the border.
#pragma once
#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "shim.h"

namespace ssdtrain {

// Stores the message for st_last_error() and returns the failed status.
st_status fail(const char* message) noexcept;

// Runs `body`; whatever it throws becomes a status.
template <class Body>
st_status guarded(Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const c10::Error& e) {
    return fail(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return fail(e.what());
  } catch (...) {
    return fail("an exception of unknown type");
  }
}

}  // namespace ssdtrain
