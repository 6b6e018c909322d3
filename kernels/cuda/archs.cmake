# td_cuda_archs(OUT ASKED SMI): the architectures that TD_CUDA_ARCHS stands for.
#   auto     the GPUs that nvidia-smi (SMI) shows, 90a for Hopper; without one 80 alone, which
#            compiles in a quarter of the time and which later GPUs run through PTX
#   package  every generation that the kernels have code for
#   others   as they are
function(td_cuda_archs out asked smi)
  if(asked STREQUAL "package")
    set(archs 80 89 90a 120)
  elseif(asked STREQUAL "auto")
    set(shown "")
    if(smi)
      execute_process(COMMAND ${smi} --query-gpu=compute_cap --format=csv,noheader
                      OUTPUT_VARIABLE shown ERROR_QUIET)
    endif()
    set(archs "")
    string(REGEX MATCHALL "[^\n]+" lines "${shown}")
    foreach(line ${lines})
      if(line MATCHES "^([0-9]+)\\.([0-9])$")
        set(arch ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
        if(arch EQUAL 90)
          set(arch 90a)
        endif()
        if(NOT arch LESS 80) # what is older is refused at run time
          list(APPEND archs ${arch})
        endif()
      endif()
    endforeach()
    list(REMOVE_DUPLICATES archs)
    if(NOT archs)
      set(archs 80)
    endif()
  else()
    set(archs ${asked})
  endif()
  set(${out} ${archs} PARENT_SCOPE)
endfunction()

# td_cuda_codes(OUT ARCHS PTX): nvcc's arguments for code of ARCHS and PTX of the list PTX; from 89 on
# there are instructions for FP8.
function(td_cuda_codes out archs ptx)
  set(codes "")
  foreach(arch ${archs})
    list(APPEND codes -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  if(ptx STREQUAL "ON")
    set(ptx 80 89)
  endif()
  if(ptx)
    foreach(arch ${ptx})
      list(APPEND codes -gencode arch=compute_${arch},code=compute_${arch})
    endforeach()
  endif()
  set(${out} ${codes} PARENT_SCOPE)
endfunction()
