# find_nvcc(nvcc problem): the CUDA compiler that works here, or why there is none.
#
#   nvcc     its path; empty without one, or when the one that was found is of no use
#   problem  what is wrong with the one that was found
#
# The one that CMAKE_CUDA_COMPILER or CUDACXX name, else that of this Python's packages (PyPI's
# cuda-toolkit[nvcc,cudart,cccl]), else the system's.
function(find_nvcc nvcc problem)
  set(${nvcc} "" PARENT_SCOPE)
  set(${problem} "" PARENT_SCOPE)
  if(CMAKE_CUDA_COMPILER)
    set(found "${CMAKE_CUDA_COMPILER}")
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    find_program(found "$ENV{CUDACXX}" NO_CACHE)
  else()
    find_program(found nvcc NO_CACHE
      HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
    # Packages bring single parts, as the libraries that torch needs: only a whole one counts.
    file(GLOB roots "${Python_SITELIB}/nvidia/cu[0-9]*")
    foreach(root IN LISTS roots)
      if(EXISTS "${root}/bin/nvcc" AND EXISTS "${root}/lib/libcudart_static.a"
         AND EXISTS "${root}/include/cuda_runtime.h" AND EXISTS "${root}/include/cccl/nv/target")
        set(found "${root}/bin/nvcc")
      endif()
    endforeach()
  endif()
  if(NOT EXISTS "${found}")
    return()
  endif()

  execute_process(COMMAND "${found}" --version OUTPUT_VARIABLE output ERROR_VARIABLE output
                  RESULT_VARIABLE failed)
  if(failed OR NOT output MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${problem} "${found} does not run: ${failed} ${output}" PARENT_SCOPE)
    return()
  endif()
  set(version "${CMAKE_MATCH_1}")
  if(version VERSION_LESS 12.0)
    set(${problem} "${found} is of CUDA ${version}; 12.0 or newer is needed" PARENT_SCOPE)
    return()
  endif()

  # PyPI's toolkit has its libraries in lib, and its nvcc looks for them in lib64. For CMake's own
  # tests of the compiler, which also tell it where the libraries are.
  cmake_path(GET found PARENT_PATH bin)
  cmake_path(GET bin PARENT_PATH root)
  if(EXISTS "${root}/lib/libcudart_static.a" AND NOT EXISTS "${root}/lib64")
    set(ENV{NVCC_APPEND_FLAGS} "$ENV{NVCC_APPEND_FLAGS} -L${root}/lib")
  endif()
  set(ENV{CUDACXX} "${found}")
  if(NOT CMAKE_CUDA_COMPILER)  # of an earlier configuration, before there was one
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(${nvcc} "${found}" PARENT_SCOPE)
    return()
  endif()
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/probe.cu" "int main() {}\n")
  execute_process(COMMAND "${found}" probe.cu -o probe WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(${problem} "${found} (CUDA ${version}) cannot compile an empty program:\n${output}"
      PARENT_SCOPE)
endfunction()
