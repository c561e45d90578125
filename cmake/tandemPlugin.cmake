# tandem_add_plugin(NAME source… [NO_INSTALL])
#
# Adds the target tandem_NAME: the plug-in tandem_NAME.so, which is installed where libtandem of the same prefix finds
# it. Libraries that it needs are linked as to any target; libtandem is not: its functions are those of the process
# that loads the plug-in. docs/plugins.md has the rest.
include(GNUInstallDirs)

function(tandem_add_plugin name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "NO_INSTALL" "" "")
    if(NOT name MATCHES "^[A-Za-z0-9_-]+$" OR NOT arg_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "tandem_add_plugin(${name}): give it a name of letters, digits, '_' and '-', and sources")
    endif()
    add_library(tandem_${name} MODULE ${arg_UNPARSED_ARGUMENTS})
    set_target_properties(tandem_${name} PROPERTIES
        PREFIX ""
        SUFFIX ".so"
        C_VISIBILITY_PRESET hidden
        CXX_VISIBILITY_PRESET hidden
        VISIBILITY_INLINES_HIDDEN ON)
    target_include_directories(tandem_${name} PRIVATE
        $<TARGET_PROPERTY:tandem::tandem,INTERFACE_INCLUDE_DIRECTORIES>)
    if(NOT arg_NO_INSTALL)
        install(TARGETS tandem_${name} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem/plugins)
    endif()
endfunction()
