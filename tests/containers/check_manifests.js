// check_manifests.js FILE...: checks manifests of Kubernetes against the schemas in the npm package kubernetes-models,
// and prints their documents as one JSON list. NODE_PATH says where the packages are. Nothing uses the network.
//
// The schemas say which fields there must be and of which types, and ignore others. So each object is wrapped, which
// notes the fields that the schema looks at: one that it never looks at is unknown to Kubernetes, most likely misspelt.
"use strict";
const fs = require("fs");
const YAML = require("yaml");

function wrap(value, path, unseen) {
    if (value === null || typeof value !== "object")
        return value;
    const list = Array.isArray(value);
    if (!list)
        Object.keys(value).forEach(key => unseen.add(`${path}.${key}`));
    const inner = {};
    return new Proxy(value, {
        get(target, key) {
            if (typeof key !== "string" || !Object.prototype.hasOwnProperty.call(target, key))
                return Reflect.get(target, key);
            unseen.delete(`${path}.${key}`);
            if (!(key in inner))
                inner[key] = wrap(target[key], list ? `${path}[${key}]` : `${path}.${key}`, unseen);
            return inner[key];
        },
    });
}

function modelOf(kind, apiVersion) {
    const Model = require(`kubernetes-models/${apiVersion}`)[kind];
    if (!Model)
        throw new Error(`${apiVersion} has no kind ${kind}`);
    return Model;
}

// The schema of a kind, as its model calls it: with the object itself, of which the model would make a copy.
function check(document) {
    const unseen = new Set();
    const Model = modelOf(document.kind, document.apiVersion);
    const model = new Model();
    const wrapped = wrap(document, document.kind, unseen);
    for (const key of Object.keys(document))
        Object.defineProperty(model, key, { get: () => wrapped[key], enumerable: true, configurable: true });
    model.validate();
    for (const field of unseen) {
        const parts = field.split(".");
        const known = [`${document.kind}.apiVersion`, `${document.kind}.kind`];
        if (!known.includes(field) && parts.length > 1)
            throw new Error(`${field} is no field that Kubernetes knows`);
    }
}

let wrong = 0;
const all = [];
for (const file of process.argv.slice(2)) {
    for (const parsed of YAML.parseAllDocuments(fs.readFileSync(file, "utf8"))) {
        try {
            if (parsed.errors.length)
                throw parsed.errors[0];
            const document = parsed.toJS();
            all.push(document);
            if (document.kind)
                check(document);
        } catch (error) {
            console.error(`${file}: ${error.message}`);
            wrong++;
        }
    }
}
console.log(JSON.stringify(all));
process.exit(wrong ? 1 : 0);
