# The CUDA kernels, as libraries that the program loads at run time and never links:
#   libtandem_cuda.so      by nvcc where there is one; the CUDA runtime is inside
#   libtandem_cuda_emu.so  the same sources as C++ on the host (tests/cuda_emu), for the tests
#   libtandem_cuda_emu_races.so  instrumented to find races, for those of kernels
# TD_CUDA: AUTO builds the first where nvcc is found, but not with sanitizers; ON insists; OFF does
# not.
# TD_CUDA_ARCHS: what it has code for, as archs.cmake has it: auto, package or a list; TD_CUDA_PTX: and PTX.
set(TD_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is), ON or OFF")
set(TD_CUDA_PTX ON CACHE STRING "Also PTX, which newer GPUs translate when the program first starts: OFF or a list; ON: 80;89")
option(TD_CUDA_UNOPTIMIZED "GPU code that nothing runs, in less time where nvcc can" OFF)
set(TD_CUDA_ARCHS auto CACHE STRING "GPUs to make code for: auto (this machine's), package (all), or a list as 80;90a")
include(${CMAKE_CURRENT_LIST_DIR}/archs.cmake)

file(GLOB TD_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cu)
file(GLOB TD_CUDA_HEADERS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cuh
     ${CMAKE_SOURCE_DIR}/kernels/cuda/*.h)

set(wanted ON)
if(TD_CUDA STREQUAL "OFF" OR (TD_CUDA STREQUAL "AUTO" AND (TD_SANITIZE OR TD_FUZZ)))
  set(wanted OFF)
endif()
if(wanted)
  find_program(TD_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(NOT TD_NVCC AND NOT TD_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "TD_CUDA=${TD_CUDA}: nvcc not found (the README says where to get it)")
  endif()
endif()

if(wanted AND TD_NVCC)
  find_program(TD_NVIDIA_SMI nvidia-smi)
  td_cuda_archs(archs "${TD_CUDA_ARCHS}" "${TD_NVIDIA_SMI}")
  td_cuda_codes(codes "${archs}" "${TD_CUDA_PTX}")
  if("90a" IN_LIST archs)
    if("90" IN_LIST archs)
      message(FATAL_ERROR "TD_CUDA_ARCHS: 90 and 90a are for the same GPUs: leave out 90")
    endif()
    list(APPEND codes -DTD_CUDA_SM90A=1)
  else()
    list(APPEND codes -DTD_CUDA_SM90A=0)
  endif()
  string(REGEX REPLACE "([0-9]+)[a-z]*;?" "X(\\1)" numbers "${archs}") # nvcc would split at commas
  list(APPEND codes -DTD_CUDA_CODE=${numbers})
  set(flags -std=c++17 -O3 -lineinfo --cudart static -I${CMAKE_SOURCE_DIR}
      -I${CMAKE_SOURCE_DIR}/include -Xcompiler -fPIC,-fvisibility=hidden,-Wall ${codes})
  if(TD_CUDA_UNOPTIMIZED)
    execute_process(COMMAND ${TD_NVCC} --help OUTPUT_VARIABLE help)
    if(help MATCHES "--Ofast-compile") # since CUDA 12.9
      list(APPEND flags -Ofc=max)
    endif()
  endif()
  set(objects "")
  foreach(source ${TD_CUDA_SOURCES})
    get_filename_component(name ${source} NAME_WE)
    set(object ${CMAKE_BINARY_DIR}/cuda/${name}.o)
    add_custom_command(OUTPUT ${object}
                       COMMAND ${CMAKE_C_COMPILER_LAUNCHER} ${TD_NVCC} ${flags} -c ${source} -o ${object}
                       DEPENDS ${source} ${TD_CUDA_HEADERS}
                               ${CMAKE_SOURCE_DIR}/include/tandem/kv_f8.h
                               ${CMAKE_SOURCE_DIR}/include/tandem/op_args.h
                               ${CMAKE_SOURCE_DIR}/include/tandem/types.h
                       COMMENT "nvcc ${name}.cu" VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/cuda)
  set(library ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/libtandem_cuda.so)
  add_custom_command(OUTPUT ${library}
                     COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
                     COMMAND ${TD_NVCC} --cudart static ${codes} -shared ${objects} -o ${library}
                             -Xlinker --exclude-libs,ALL
                     DEPENDS ${objects} COMMENT "Linking libtandem_cuda.so" VERBATIM)
  add_custom_target(tandem_cuda ALL DEPENDS ${library})
  message(STATUS "CUDA: ${TD_NVCC}, code for ${archs}")
else()
  message(STATUS "CUDA: no kernels for GPUs are built")
endif()

# The emulator. Without a C++ compiler its tests skip, visibly.
include(CheckLanguage)
if(NOT TD_FUZZ)
  check_language(CXX)
endif()
option(TD_CUDA_EMULATOR "Build the GPU's kernels for the CPU, which tests run" ON)
if(CMAKE_CXX_COMPILER AND TD_CUDA_EMULATOR AND NOT TD_FUZZ)
  enable_language(CXX)
  file(GLOB emulator CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cuda_emu/*.cpp)
  # tests/cuda_emu/race.h: instrumented as for ThreadSanitizer, without its runtime, where no other sanitizer is.
  set(instrumented "$<$<STREQUAL:$<TARGET_PROPERTY:NAME>,tandem_cuda_emu_races>:-fsanitize=thread>")
  set_source_files_properties(${TD_CUDA_SOURCES} PROPERTIES LANGUAGE CXX
                              COMPILE_OPTIONS "-x;c++;-fno-strict-aliasing;-Wno-unknown-pragmas;-DTD_CUDA_SM90A=1;-DTD_CUDA_CODE=X(80)X(89)X(90)X(120);${instrumented}")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/tests/cuda_emu/mistakes.cpp PROPERTIES
                              COMPILE_OPTIONS "-Wno-unknown-pragmas;${instrumented}")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/tests/cuda_emu/mma.cpp PROPERTIES COMPILE_OPTIONS -fno-sanitize=all)
  set(emulators tandem_cuda_emu)
  if(NOT TD_SANITIZE)
    list(APPEND emulators tandem_cuda_emu_races)
  endif()
  foreach(name ${emulators})
    add_library(${name} MODULE ${TD_CUDA_SOURCES} ${emulator} ${CMAKE_SOURCE_DIR}/src/base/jitter.c)
    set_target_properties(${name} PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON
                          CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
                          C_VISIBILITY_PRESET hidden
                          LIBRARY_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
    target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/include
                               ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/src)
    target_include_directories(${name} SYSTEM PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda_emu)
    target_compile_definitions(${name} PRIVATE EMU_RACES=$<STREQUAL:${name},tandem_cuda_emu_races>)
    target_link_libraries(${name} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
    target_compile_options(${name} PRIVATE -O2) # for speed under sanitizers, too
  endforeach()
  # ThreadSanitizer does not know the fibers of a block, which are one thread; AddressSanitizer sees what is out of
  # bounds.
  if(TD_SANITIZE STREQUAL "thread")
    target_compile_options(tandem_cuda_emu PRIVATE -fno-sanitize=thread)
    set_source_files_properties(${CMAKE_SOURCE_DIR}/tests/cuda_emu/system.cpp PROPERTIES
                                COMPILE_OPTIONS -fsanitize=thread)
  elseif(TD_SANITIZE STREQUAL "address")
    target_compile_options(tandem_cuda_emu PRIVATE
                           -fno-sanitize=alignment,null,object-size,pointer-overflow,bounds)
  endif()
endif()
