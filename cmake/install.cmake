# The files of `cmake --install`. Both package files derive the prefix from their own path, so that an
# installed tree can be moved.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)

install(TARGETS tandem EXPORT tandem-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS tdbench tdcheck tdmerge tdrun RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tandem
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/man/tdrun.1 ${PROJECT_SOURCE_DIR}/man/tdbench.1
    ${PROJECT_SOURCE_DIR}/man/tdcheck.1 ${PROJECT_SOURCE_DIR}/man/tdmerge.1
    DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(EXPORT tandem-targets
    NAMESPACE tandem::
    FILE tandemTargets.cmake
    DESTINATION ${package_dir})

configure_package_config_file(
    ${PROJECT_SOURCE_DIR}/cmake/tandemConfig.cmake.in
    ${PROJECT_BINARY_DIR}/cmake/tandemConfig.cmake
    INSTALL_DESTINATION ${package_dir}
    NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
    ${PROJECT_BINARY_DIR}/cmake/tandemConfigVersion.cmake
    COMPATIBILITY ${package_compatibility})
install(FILES
    ${PROJECT_BINARY_DIR}/cmake/tandemConfig.cmake
    ${PROJECT_BINARY_DIR}/cmake/tandemConfigVersion.cmake
    ${PROJECT_SOURCE_DIR}/cmake/tandemPlugin.cmake
    DESTINATION ${package_dir})

file(RELATIVE_PATH prefix_from_pc
    ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" prefix_from_pc ${prefix_from_pc})
file(RELATIVE_PATH libdir_from_prefix ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH includedir_from_prefix ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
configure_file(
    ${PROJECT_SOURCE_DIR}/cmake/tandem.pc.in
    ${PROJECT_BINARY_DIR}/cmake/tandem.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/tandem.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
