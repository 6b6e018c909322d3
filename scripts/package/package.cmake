# cmake --install, and `cpack -G DEB`, which makes a package of it with a systemd unit.
include(GNUInstallDirs)

install(TARGETS tandem RUNTIME)
install(FILES ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/libtandem_cuda.so
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem OPTIONAL)

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
install(FILES ${CMAKE_SOURCE_DIR}/README.md ${CMAKE_SOURCE_DIR}/LICENSE
              ${CMAKE_SOURCE_DIR}/configs/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(CPACK_PACKAGE_NAME tandem)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "large Mixture-of-Experts language models on a machine you own")
set(CPACK_PACKAGE_CONTACT "tandem maintainers <tandem@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_GENERATOR DEB)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS libcurl4) # for tandem pull, loaded at run time
include(CPack)
