#include "aserve/cpu.h"

#include "aserve/probe.h"
#include "bind.h"

namespace aserve {
namespace {

void run_each(Team& team, int64_t n, const py::function& function) {
  py::gil_scoped_release release;
  team.run(n, [&](int64_t i) {
    py::gil_scoped_acquire acquire;
    try {
      function(i);
    } catch (const py::error_already_set& error) {  // may only be held and freed under the lock
      throw std::runtime_error(error.what());
    }
  });
}

}  // namespace

void bind_cpu(py::module_& module) {
  py::class_<Team>(module, "Team")
      .def(py::init([](int threads) {
             require(threads >= 1 && threads <= 1024, "a team has 1 to 1024 threads");
             return std::make_unique<Team>(threads);
           }),
           py::arg("threads"))
      .def_property_readonly("threads", &Team::threads)
      .def("run", &run_each, "function(i) for each i in [0, n) on the threads of the team.");
  module.def("level", [] { return level_name(level()); });
  module.def("level_max", [] { return level_name(level_max()); });
  module.def(
      "set_level",
      [](const std::string& name) {
        Level wanted;
        require(level_from_name(name.c_str(), &wanted), "a level is generic, avx2, avx512 or amx");
        return level_name(set_level(wanted));
      },
      "Use no better than this level; answers the level now in force.");
  module.def(
      "probe_read",
      [](Team& team, Address data, int64_t bytes) {
        require(data % 64 == 0 && bytes >= 0 && bytes % 64 == 0, "64-byte words are read");
        py::gil_scoped_release release;
        return probe_read(team, at<const void>(data), bytes);
      },
      "Reads memory once with all threads; the sum of its 64-bit words.");
  module.def(
      "probe_products",
      [](Team& team, int64_t rounds) {
        py::gil_scoped_release release;
        return probe_products(team, rounds);
      },
      "Products of bfloat16 tiles in registers; the operations done, 0 without tiles.");
}

}  // namespace aserve
