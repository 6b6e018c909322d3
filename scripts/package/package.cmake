# cmake --install, and `cpack -G DEB`, which makes a package of it with a systemd unit.
include(GNUInstallDirs)

install(TARGETS tandem RUNTIME)
install(FILES ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/libtandem_cuda.so
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem OPTIONAL)
install(CODE "set(cuda \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/tandem/libtandem_cuda.so)
  if(CMAKE_INSTALL_DO_STRIP AND EXISTS \${cuda})
    execute_process(COMMAND ${CMAKE_STRIP} --strip-unneeded \${cuda} COMMAND_ERROR_IS_FATAL ANY)
  endif()")

# The embedding API: tandem.h, the library and its pkg-config file.
set_target_properties(tandem_core PROPERTIES OUTPUT_NAME tandem)
install(TARGETS tandem_core ARCHIVE)
install(FILES ${CMAKE_SOURCE_DIR}/include/tandem.h TYPE INCLUDE)
list(TRANSFORM OpenMP_C_LIB_NAMES PREPEND -l OUTPUT_VARIABLE openmp)
string(REPLACE ";" " " TD_OPENMP_LIBS "${openmp}")
configure_file(${CMAKE_SOURCE_DIR}/scripts/package/tandem.pc.in ${CMAKE_BINARY_DIR}/tandem.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/tandem.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES ${CMAKE_SOURCE_DIR}/scripts/package/tandem.service DESTINATION lib/systemd/system)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/configs/examples ${CMAKE_SOURCE_DIR}/configs/machines ${CMAKE_SOURCE_DIR}/configs/cards DESTINATION
        ${CMAKE_INSTALL_DOCDIR})
# What the program writes of its options: the man page and completions of shells.
set(written ${CMAKE_BINARY_DIR}/written)
install(CODE "file(MAKE_DIRECTORY ${written})
  foreach(form man bash zsh fish)
    execute_process(COMMAND $<TARGET_FILE:tandem> help --\${form} OUTPUT_FILE ${written}/\${form}
                    COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  execute_process(COMMAND gzip -9nc ${written}/man OUTPUT_FILE ${written}/man.gz COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND gzip -9nc ${CMAKE_BINARY_DIR}/changelog OUTPUT_FILE ${written}/changelog.gz
                  COMMAND_ERROR_IS_FATAL ANY)")
install(FILES ${written}/man.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 RENAME tandem.1.gz)
install(FILES ${written}/bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME tandem)
install(FILES ${written}/zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions RENAME _tandem)
install(FILES ${written}/fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d RENAME tandem.fish)

# Debian's copyright and changelog.
file(READ ${CMAKE_SOURCE_DIR}/LICENSE license)
string(REGEX MATCH "Copyright \\(c\\) ([^\n]*)" _ "${license}")
set(TD_COPYRIGHT "${CMAKE_MATCH_1}")
string(REGEX REPLACE "^.*Copyright[^\n]*\n\n" "" license "${license}")
string(STRIP "${license}" license)
string(REPLACE "\n\n" "\n.\n" license "${license}")
string(REPLACE "\n" "\n " TD_LICENSE "${license}")
configure_file(${CMAKE_SOURCE_DIR}/scripts/package/copyright.in ${CMAKE_BINARY_DIR}/copyright @ONLY)
file(WRITE ${CMAKE_BINARY_DIR}/changelog "tandem (${PROJECT_VERSION}-1) unstable; urgency=medium

  * RELEASES.md in this folder says what changed.

 -- tandem maintainers <tandem@example.org>  Sun, 29 Nov 2026 12:00:00 +0000
")
install(FILES ${CMAKE_BINARY_DIR}/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES ${written}/changelog.gz DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME changelog.Debian.gz)
install(FILES ${CMAKE_SOURCE_DIR}/.github/RELEASES.md ${CMAKE_SOURCE_DIR}/README.md DESTINATION
        ${CMAKE_INSTALL_DOCDIR})
install(FILES ${CMAKE_SOURCE_DIR}/configs/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME OPTIONS.md)

set(CPACK_PACKAGE_NAME tandem)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "large Mixture-of-Experts language models on a machine you own")
set(CPACK_PACKAGE_CONTACT "tandem maintainers <tandem@example.org>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_GENERATOR DEB)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
string(CONCAT CPACK_DEBIAN_PACKAGE_DESCRIPTION
  "tandem runs models that are larger than a GPU's memory at the precision they\n"
  "were published in: experts lie in CPU memory, attention on the GPU, if there\n"
  "is one. A server with the APIs of OpenAI, Anthropic and Ollama, a command\n"
  "line, and a benchmark harness.")
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS libcurl4) # for tandem pull, loaded at run time
include(CPack)
